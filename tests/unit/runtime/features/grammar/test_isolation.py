"""Matchers in processes of their own: equal results, and recovery from crashes."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.isolation import loader as isolated
from sylvan.runtime.features.grammar.isolation.loader import IsolatedLoader
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.wire import preparation
from tests.support.grammar import TOKENS, accept, allowed, make_backend, vocabulary

HERE = make_backend("llguidance")

DEADLY = '''
"""llguidance, of which some tokens are deadly."""
import os
from sylvan.runtime.features.grammar.backends import llguidance


class _Matcher:
    def __init__(self, matcher):
        self._matcher = matcher

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def accept_all(self, tokens):
        if ord("!") in tokens:
            os.abort()
        while ord("~") in tokens:
            pass
        if ord("^") in tokens:
            hoard = bytearray(4 << 30)
        return self._matcher.accept_all(tokens)


class _Compiled:
    library = "deadly"

    def __init__(self, compiled):
        self._compiled = compiled

    def matcher(self):
        return _Matcher(self._compiled.matcher())


class BACKEND(llguidance.LLGuidance):
    def load(self, data):
        if data == b"die":
            os.abort()
        return _Compiled(super().load(data))
'''


@pytest.fixture
def make_loader(monkeypatch, tmp_path) -> Iterator[Callable[[str], IsolatedLoader]]:
    """Makes loaders whose zygote finds one more library."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "deadly.py").write_text(DEADLY)
    (tmp_path / "sitecustomize.py").write_text(
        "import sylvan.runtime.features.grammar.backends as backends\n"
        f"backends.__path__.append({str(folder)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[IsolatedLoader] = []

    def make(library: str = "deadly") -> IsolatedLoader:
        limits = Limits(memory_bytes=256 << 20)
        made.append(IsolatedLoader(preparation(library, vocabulary(), limits)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def loader(make_loader) -> IsolatedLoader:
    return make_loader()


def grammar(text: str) -> bytes:
    return HERE.compile(GrammarSpec("regex", text)).dump()


@pytest.mark.parametrize("seed", range(4))
def test_a_matcher_is_as_one_in_this_process(loader, seed) -> None:
    rng = random.Random(seed)
    data = grammar('(yes|yeah) [0-9]{2,4}|key="(red|rosé|é)"')
    there, here = loader.load(data).matcher(), HERE.load(data).matcher()
    taken: list[int] = []
    for _ in range(60):
        ids = sorted(allowed(here))
        assert sorted(allowed(there)) == ids
        assert there.forced() == here.forced()
        assert there.is_accepting() == here.is_accepting()
        assert there.is_terminated() == here.is_terminated()
        if taken and (not ids or rng.random() < 0.3):
            count = rng.randrange(1, len(taken) + 1)
            there.rollback(count)
            here.rollback(count)
            del taken[-count:]
            continue
        tokens = rng.choices(ids, k=1) if rng.random() < 0.7 else rng.choices(b"kyes9=a", k=3)
        took = here.accept_all(tokens)
        if len(tokens) == 1:
            assert there.accept(tokens[0]) == took
        else:
            assert there.accept_all(tokens) == took
        taken += tokens[:took]
    assert there.error() == here.error() == ""


def test_matchers_of_a_grammar_go_their_own_ways(loader) -> None:
    compiled = loader.load(grammar("[a-c]{3}|zz(x|y)"))
    matchers = [compiled.matcher() for _ in range(200)]  # more than sockets have room for
    for i, matcher in enumerate(matchers):
        assert accept(matcher, (b"ab", b"zz")[i % 2])
    bits = np.zeros((len(matchers), vocabulary().words), np.int32)

    type(matchers[0]).fill_masks(matchers, bits, range(len(matchers)))

    found = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    ways = [{TOKENS[i] for i in np.flatnonzero(row)} for row in found]
    assert ways[0] == {b"a", b"b", b"c"}
    assert ways[1] == {b"x", b"y"}
    assert ways == ways[:2] * 100


@pytest.mark.parametrize("end", [b"!", b"~", b"^"], ids=["crash", "time", "memory"])
def test_a_step_that_ends_its_server_costs_one_output(loader, end) -> None:
    compiled = loader.load(grammar("[a-z]{1,9}[!~^]?"))
    innocent, culprit = compiled.matcher(), compiled.matcher()
    assert accept(innocent, b"ab")
    assert accept(culprit, b"x")

    culprit.accept(end[0])
    culprit.is_accepting()

    assert "ended on this output" in culprit.error()
    assert allowed(culprit) == set()
    assert not culprit.accept(ord("a"))
    assert accept(innocent, b"cdefghi")
    assert {TOKENS[i] for i in allowed(innocent)} == {b"!", b"~", b"^"}
    assert innocent.error() == ""


def test_a_server_that_is_killed_costs_nothing(loader) -> None:
    compiled = loader.load(grammar("[a-c]{3}"))
    matcher = compiled.matcher()
    assert matcher.accept(ord("a"))
    assert not matcher.is_accepting()
    servers = [pid for pid in members(loader) if depth(pid, loader) == 2]
    for pid in servers:
        os.kill(pid, signal.SIGKILL)

    assert matcher.accept_all([ord("b"), ord("c")]) == 2
    assert matcher.is_terminated()
    assert len(servers) == 1


def test_an_output_that_takes_too_much_on_average_ends(make_loader) -> None:
    data = msgspec.msgpack.encode(("regex", "((a{0,100}){0,100}){0,100}"))
    pytest.importorskip("xgrammar")
    hard = make_loader("xgrammar").load(data).matcher()
    taken = 0
    while hard.accept(ord("a")) and not hard.error():
        hard.is_accepting()
        taken += 1
        assert taken < 2_000

    assert hard.error()
    assert allowed(hard) == set()


def test_what_cannot_be_loaded_is_refused(loader) -> None:
    with pytest.raises(RequestError) as caught:
        loader.load(b"start: /(/")
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="ended") as caught:
        loader.load(b"die")
    assert caught.value.status == 503
    assert accept(loader.load(grammar("ab")).matcher(), b"ab")


def test_a_zygote_that_is_lost_is_started_again(loader) -> None:
    before = loader.load(grammar("ab")).matcher()
    assert before.accept(ord("a"))
    os.kill(loader._process.pid, signal.SIGKILL)
    loader._process.wait()

    assert accept(loader.load(grammar("cd")).matcher(), b"cd")
    assert before.accept(ord("b"))


def test_grammars_in_use_are_bounded(loader, monkeypatch) -> None:
    monkeypatch.setattr(isolated, "MAX_GRAMMARS", 2)
    kept = [loader.load(grammar(f"a{i}")) for i in range(2)]
    with pytest.raises(RequestError, match="2 grammars are in use") as caught:
        loader.load(grammar("b"))
    assert caught.value.status == 503
    kept.pop()
    gc.collect()

    assert loader.load(grammar("b"))


def test_processes_end_with_their_grammar_and_with_the_loader(loader) -> None:
    compiled = loader.load(grammar("ab"))
    matcher = compiled.matcher()
    assert matcher.accept(ord("a"))
    assert not matcher.is_accepting()
    assert len(members(loader)) == 3
    del compiled, matcher
    gc.collect()
    wait(lambda: len(members(loader)) == 1)
    kept = loader.load(grammar("cd"))
    pids = members(loader)
    loader.close()

    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert kept.matcher().accept(ord("c")) is False


def members(loader: IsolatedLoader) -> list[int]:
    """Processes of the loader's group that have not ended."""
    group, found = loader._process.pid, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def depth(pid: int, loader: IsolatedLoader) -> int:
    """How far below the zygote a process is."""
    steps = 0
    while pid != loader._process.pid:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        steps += 1
    return steps


def wait(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.01)
