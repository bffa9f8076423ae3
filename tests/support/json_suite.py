"""The official tests of JSON Schema, by draft, from the source package of `jsonschema`.

They are downloaded once into a cache folder, and not stored in this repository.
"""

from __future__ import annotations

import fcntl
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarMatcher
from sylvan.runtime.features.grammar.compiler.client import CompilerSetup, GrammarCompiler
from sylvan.runtime.features.grammar.forced import Jumper
from sylvan.runtime.features.grammar.guard.guard import GuardedGrammar
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.work import LoadedGrammar
from sylvan.text.tokenizer import Tokenizer

SAPLING = Path(str(files("sylvan") / "assets" / "sapling"))
PACKAGE, VERSION = "jsonschema", "4.26.0"
REMOTE = "http://localhost:1234/"

TIMEOUT_S = {"outlines_core": 2.0}
"""By library, where it is not 30: of whole automata, large schemas are not worth the wait."""

_PATIENCE_S = 300
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


class UnreachableError(Exception):
    """The package cannot be downloaded."""


@dataclass(frozen=True)
class Case:
    """A schema with valid and invalid values."""

    file: str
    name: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


@dataclass(frozen=True)
class Suite:
    cases: tuple[Case, ...]
    remotes: dict[str, Any]  # schemas by the address that others know them by

    def retrieve(self, address: str) -> Any:
        """For validators: what is at an address."""
        return self.remotes[address.partition("#")[0]]


def load_suite(folder: Path, draft: str = "draft2020-12") -> Suite:
    """Load the suite of a draft; `folder` is the cache, which several processes may share.

    Raises:
        UnreachableError: It cannot be downloaded; says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{PACKAGE}-{VERSION}"
    archive = folder / f"{name}.tar.gz"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _download(folder)
        with tarfile.open(archive) as tar:
            members = {
                str(PurePosixPath(member.name).relative_to(f"{name}/json")): tar.extractfile(member)
                for member in tar
                if member.isfile() and member.name.startswith(f"{name}/json/")
            }
            texts = {path: f.read() for path, f in members.items() if f and path.endswith(".json")}
    return _read(texts, draft)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"pip download took more than {_PATIENCE_S} s") from None
    if done.returncode:
        raise UnreachableError(f"pip download failed: {done.stderr.strip()[-500:]}")


def _read(texts: dict[str, bytes], draft: str) -> Suite:
    cases: list[Case] = []
    remotes: dict[str, Any] = {}
    for path, text in sorted(texts.items()):
        parts = PurePosixPath(path).parts
        if parts[:2] == ("tests", draft):
            file = "/".join(parts[2:]).removesuffix(".json")
            cases += [_case(file, _named(found, draft)) for found in json.loads(text)]
        elif parts[0] == "remotes":
            remotes[REMOTE + "/".join(parts[1:])] = json.loads(text)
    return Suite(tuple(cases), remotes)


def _named(found: Any, draft: str) -> Any:
    """A group of tests whose schema says which draft it is of; without, it is of the latest."""
    schema = found["schema"]
    if draft == "draft2020-12" or not isinstance(schema, dict) or "$schema" in schema:
        return found
    return {**found, "schema": {"$schema": DRAFTS[draft], **schema}}


def _case(file: str, found: Any) -> Case:
    values: dict[bool, list[Any]] = {True: [], False: []}
    for test in found["tests"]:
        values[test["valid"]].append(test["data"])
    name = found["description"]
    return Case(file, name, found["schema"], tuple(values[True]), tuple(values[False]))


class Compilers:
    """A library in its compile process, with the tokens of the built-in model."""

    def __init__(self, name: str, timeout_s: float) -> None:
        found = vocabulary_of(Tokenizer.load(SAPLING), 0)
        self.vocabulary = found
        limits = Limits(timeout_s=timeout_s, quick_s=min(1.0, timeout_s))
        self._compiler = GrammarCompiler(
            name, lambda: CompilerSetup(Loaders(found, limits)), limits
        )

    def compile(self, cases: Sequence[Case]) -> list[CompiledGrammar | None]:
        """Return for each case a grammar that enforces all of it; None if it is refused."""
        return [found and found.grammar for found in self._compile(cases, exact=True)]

    def compile_guarded(self, cases: Sequence[Case]) -> list[LoadedGrammar | None]:
        """Return for each case a grammar, and the guard for the rest; None if it is refused."""
        return self._compile(cases, exact=False)

    def _compile(self, cases: Sequence[Case], *, exact: bool) -> list[LoadedGrammar | None]:
        texts = [json.dumps(case.schema) for case in cases]
        specs = [GrammarSpec("json_schema", text, exact) for text in texts]
        tickets = [self._compiler.request(spec) for spec in specs]
        give_up = time.monotonic() + _PATIENCE_S
        for ticket in tickets:
            while not ticket.done:
                assert time.monotonic() < give_up, "a grammar is never done"
                time.sleep(0.005)
            status = ticket.error.status if ticket.error else 400
            assert status == 400, ticket.error
            self._compiler.forget(ticket)
        return [ticket.grammar for ticket in tickets]

    def close(self) -> None:
        self._compiler.close()


class Writer:
    """Writes random outputs of a grammar, from masks and forced tokens, preferring to end."""

    def __init__(self, vocabulary: Vocabulary, most: int = 80) -> None:
        self._vocabulary, self._most = vocabulary, most
        self._jumper = Jumper(vocabulary)
        self._row = np.zeros(vocabulary.words, np.int32)
        self._closing = np.array([_is_closing(token) for token in vocabulary.tokens])

    def write(self, matcher: GrammarMatcher, seed: int) -> bytes | None:
        """Return a whole output; None if it did not end in time."""
        rng, tokens = random.Random(seed), self._vocabulary.tokens
        text = b""
        for step in range(self._most):
            if seed % 2:
                text += b"".join(tokens[i] for i in self._jumper.advance(matcher))
            if matcher.is_terminated():
                return text
            ids = self._allowed(matcher)
            if matcher.is_accepting() and (not len(ids) or rng.random() < 0.5):
                return text
            assert len(ids), f"nothing may follow {text!r}: {matcher.error()}"
            closing = ids[self._closing[ids]]
            hurry = rng.random() < (0.6 if step < self._most // 4 else 0.98)
            token = int(rng.choice(closing if len(closing) and hurry else ids))
            assert matcher.accept(token), (text, tokens[token])
            text += tokens[token]
        return None

    def _allowed(self, matcher: GrammarMatcher) -> NDArray[np.int64]:
        if not matcher.fill_mask(self._row):
            self._row[:] = -1
        bits = np.unpackbits(self._row.view(np.uint8), bitorder="little")[: len(self._closing)]
        bits[list(self._vocabulary.eos_ids)] = 0
        return np.flatnonzero(bits)


def accepts(grammar: CompiledGrammar, value: Any, byte_ids: Sequence[int]) -> bool:
    """Whether some common serialisation of a value is allowed."""
    ways = [
        json.dumps(value, ensure_ascii=ascii_, separators=marks)
        for ascii_ in (True, False)
        for marks in ((",", ":"), (", ", ": "))
    ]
    return any(_accepts(grammar.matcher(), way.encode(), byte_ids) for way in ways)


def byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The id of each single byte."""
    found = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens)))}
    return [found[bytes([byte])] for byte in range(256)]


def guard_allows(guarded: GuardedGrammar, value: Any) -> bool:
    """Whether no part of a value is rolled back."""
    watch = guarded.watch()
    return watch.write(json.dumps(value).encode()) is None and watch.end() is None


def _accepts(matcher: GrammarMatcher, text: bytes, ids: Sequence[int]) -> bool:
    return all(matcher.accept(ids[byte]) for byte in text) and matcher.is_accepting()


def _is_closing(token: bytes) -> bool:
    return bool(token) and all(byte in b'"}],:.0123456789eltrufasn-' for byte in token)
