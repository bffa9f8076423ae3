"""The official tests of JSON Schema: what a library accepts, it holds.

A schema may be refused. One that is accepted must not allow a value that is not valid by it, and
whatever is generated under it must be valid.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest

from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.runtime.features.grammar.work import LoadedGrammar
from tests.support.json_suite import (
    DRAFTS,
    REMOTE,
    SAPLING,
    TIMEOUT_S,
    Case,
    Compilers,
    Suite,
    UnreachableError,
    Writer,
    accepts,
    byte_ids,
    guard_allows,
    load_suite,
)

AT_A_TIME = 100
OUTPUTS = 4
MORE_OUTPUTS, LONGER = 40, 400  # where none of them ended; in tokens
MIN_ACCEPTED = {"llguidance": 350, "combined": 350, "xgrammar": 90, "outlines_core": 40}
UNLIKE = ("optional/format/", "optional/non-bmp-regex", "optional/ecmascript-regex")
"""Leap seconds, Unicode's white space: formats and patterns are regular here, no programs."""

STRICTER = ("format", "vocabulary")
"""Formats are held, where the standard leaves that open; dialects of others are not fetched."""

ENDLESS: Mapping[str, Mapping[str, str]] = {name: {} for name in MIN_ACCEPTED}
"""Accepted schemas of which no output ends, by library, with the reason."""


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    assert request.config.cache is not None
    try:
        return load_suite(request.config.cache.mkdir("json-schema-suite"))
    except UnreachableError as error:
        pytest.skip(f"NOT TESTED: the JSON Schema test suite cannot be downloaded ({error})")


def validator(suite: Suite, case: Case) -> Any:
    return importlib.import_module("jsonschema_rs").validator_for(
        case.schema, retriever=suite.retrieve
    )


def read(text: bytes) -> Any:
    """JSON, with numbers that no float can hold."""
    return json.loads(text.decode(), parse_float=Decimal)


@pytest.mark.slow
@pytest.mark.parametrize("name", installed_backends())
def test_what_is_accepted_is_held(name: str, suite: Suite, request: pytest.FixtureRequest) -> None:
    compilers = Compilers(name, TIMEOUT_S.get(name, 30.0))
    request.addfinalizer(compilers.close)  # ends processes in which grammars live
    grammars = compilers.compile(suite.cases)
    writer, ids = Writer(compilers.vocabulary), byte_ids(compilers.vocabulary)
    patient = Writer(compilers.vocabulary, LONGER)
    wrong: list[str] = []
    endless: set[str] = set()
    accepted = finished = 0
    for case, grammar in zip(suite.cases, grammars, strict=True):
        if grammar is None:
            continue
        accepted += 1
        where = f"{case.file}: {case.name}"
        if not case.file.startswith(UNLIKE):
            wrong += [f"{where}: {v!r}" for v in case.invalid if accepts(grammar, v, ids)]
        valid = validator(suite, case)
        texts = [writer.write(grammar.matcher(), seed) for seed in range(OUTPUTS)]
        ended = [text for text in texts if text is not None]
        finished += len(ended)
        more = range(OUTPUTS, MORE_OUTPUTS)
        while not ended and more:
            text = patient.write(grammar.matcher(), more[0])
            ended, more = [text] if text is not None else [], more[1:]
        if not ended:
            endless.add(where)
        for text in ended:
            if not valid.is_valid(read(text)):
                wrong.append(f"{where}: {text!r} was generated")

    assert endless == set(ENDLESS[name])
    assert not wrong, "\n".join(wrong)
    assert accepted >= MIN_ACCEPTED[name]
    assert finished >= accepted * OUTPUTS // 2


HOLDING = [name for name in installed_backends() if name != "outlines_core"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft"),
    [*((name, "draft2020-12") for name in HOLDING), *((HOLDING[0], d) for d in [*DRAFTS][1:])],
)
def test_every_schema_is_accepted_and_held(
    name: str, draft: str, suite: Suite, request: pytest.FixtureRequest
) -> None:
    if draft != "draft2020-12":
        assert request.config.cache is not None
        suite = load_suite(request.config.cache.mkdir("json-schema-suite"), draft)
    compilers = Compilers(name, TIMEOUT_S.get(name, 30.0))
    request.addfinalizer(compilers.close)
    ids = byte_ids(compilers.vocabulary)
    wrong: list[str] = []
    refused: list[str] = []
    for case, found in compiled_by_part(compilers, suite.cases):
        where = f"{case.file}: {case.name}"
        if found is None:
            local = "json-schema.org/" not in json.dumps(_without_dialect(case.schema))
            if case.valid and local and REMOTE not in json.dumps(case.schema):
                refused.append(where)
            continue
        if case.file.startswith(UNLIKE) or found.guard is None:
            continue
        for value in case.invalid:
            if accepts(found.grammar, value, ids) and guard_allows(found.guard, value):
                wrong.append(f"{where}: {value!r} is not valid")
        for value in () if case.file in STRICTER else case.valid:
            if not guard_allows(found.guard, value):
                wrong.append(f"{where}: {value!r} is valid")

    assert not wrong, "\n".join(wrong)
    assert len(refused) <= 0.02 * len(suite.cases), "\n".join(refused)


def compiled_by_part(
    compilers: Compilers, cases: Sequence[Case]
) -> Iterator[tuple[Case, LoadedGrammar | None]]:
    """Libraries in processes of their own hold so many grammars at a time."""
    for at in range(0, len(cases), AT_A_TIME):
        part = cases[at : at + AT_A_TIME]
        yield from zip(part, compilers.compile_guarded(part), strict=True)


def _without_dialect(schema: Any) -> Any:
    return {k: v for k, v in schema.items() if k != "$schema"} if isinstance(schema, dict) else 0


def test_the_suite_is_whole(suite: Suite) -> None:
    assert len(suite.cases) > 400
    assert {"anyOf", "ref", "type", "optional/format/date"} <= {c.file for c in suite.cases}
    assert SAPLING.exists()
