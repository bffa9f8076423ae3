"""Compiling in a process of its own: limits, lanes, what is kept, and what is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sylvan.runtime.features.grammar.compiler.client import GrammarCompiler, Setup, Ticket
from sylvan.runtime.features.grammar.compiler.messages import Limits
from sylvan.runtime.features.grammar.compiler.store import GrammarStore
from sylvan.runtime.features.grammar.spec import MAX_DEPTH, MAX_TEXT_BYTES, GrammarSpec
from tests.support.grammar import accept, make_backend, vocabulary

PATIENCE_S = 120.0


def make(limits: Limits | None = None, store: Path | None = None) -> GrammarCompiler:
    words = vocabulary()

    def setup() -> Setup:
        return Setup(make_backend("llguidance"), words, GrammarStore(store) if store else None)

    return GrammarCompiler("llguidance", setup, limits or Limits())


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make()
    yield compiler
    compiler.close()


def wait(*tickets: Ticket) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not all(t.done for t in tickets):
        assert time.monotonic() < give_up, "a grammar is never done"
        os.sched_yield()


def compile_one(compiler: GrammarCompiler, kind: str, text: str) -> Ticket:
    ticket = compiler.request(GrammarSpec(kind, text))
    wait(ticket)
    compiler.forget(ticket)
    return ticket


def test_a_grammar_comes_back_ready(compiler) -> None:
    ticket = compile_one(compiler, "regex", "a+b")

    assert ticket.error is None
    assert accept(ticket.grammar.matcher(), b"aab")
    assert compiler.stats.compiled == 1


def test_all_that_ask_for_a_grammar_share_it(compiler) -> None:
    tickets = [compiler.request(GrammarSpec("regex", "a+b")) for _ in range(3)]
    wait(*tickets)
    later = compile_one(compiler, "regex", "a+b")

    assert len({id(t) for t in tickets}) == 1
    assert later.grammar is tickets[0].grammar
    assert (compiler.stats.compiled, compiler.stats.cache_hits) == (1, 1)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


BAD = [
    ("regex", "(a", "unclosed"),
    ("json_schema", '{"type": "nope"}', "nope"),
    ("json_schema", '{"type": "object', "not valid JSON"),
    ("json_schema", '{"$ref": "#"}', "no text"),
    ("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}', "no text"),
    ("json_schema", nested(MAX_DEPTH + 1), f"at most {MAX_DEPTH}"),
    ("json_schema", nested(100_000), ""),
    ("json_schema", '{"enum": ["' + "x" * (5 << 20) + '"]}', f"at most {MAX_TEXT_BYTES}"),
    ("regex", "(" * 500 + ")" * 500, f"at most {MAX_DEPTH}"),
    ("ebnf", "root ::= root", "no text"),
    ("ebnf", "root ::= \0", "NUL"),
    ("structural_tag", "[]", "must be an object"),
]


def test_bad_grammars_are_refused_and_the_next_is_served(compiler) -> None:
    for kind, text, reason in BAD:
        ticket = compile_one(compiler, kind, text)
        assert ticket.error is not None, (kind, text[:50])
        assert (ticket.error.status, ticket.error.param) == (400, kind)
        assert reason in str(ticket.error)

    assert compile_one(compiler, "regex", "fine").error is None
    assert compiler.stats.restarts == 1


def test_a_refusal_is_remembered(compiler) -> None:
    first = compile_one(compiler, "regex", "(a")
    again = compiler.request(GrammarSpec("regex", "(a"))

    assert again.done
    assert str(again.error) == str(first.error)


def test_many_bad_grammars_leave_nothing_behind(compiler) -> None:
    compile_one(compiler, "regex", "(b")
    gc.collect()
    # what earlier tests left in this process may end meanwhile: fewer is no leak
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for i in range(120):
        kind, text, _ = BAD[i % 5]
        assert compile_one(compiler, kind, f"{text}{i}").error is not None
    gc.collect()

    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not compiler._underway
    assert compiler._life is not None
    assert not compiler._life.owed
    children = Path(
        f"/proc/{compiler._life.process.pid}/task/{compiler._life.process.pid}/children"
    )
    assert children.read_text().split() == []


SLEEPY = '''
"""Stands in for a library: texts say what compiling them does."""
import os, time
from sylvan.runtime.features.grammar.backends import llguidance


class BACKEND(llguidance.LLGuidance):
    def compile(self, spec):
        if spec.text == "hang":
            while True:
                time.sleep(60)
        if spec.text == "spin":
            while True:
                pass
        if spec.text == "eat":
            hoard = bytearray(4 << 30)
        if spec.text == "die":
            os.abort()
        return super().compile(spec)
'''


@pytest.fixture
def make_sleepy(monkeypatch, tmp_path) -> Iterator[Callable[..., GrammarCompiler]]:
    """Makes compilers whose process finds one more backend."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "sleepy.py").write_text(SLEEPY)
    (tmp_path / "sitecustomize.py").write_text(
        "import sylvan.runtime.features.grammar.backends as backends\n"
        f"backends.__path__.append({str(folder)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words, made = vocabulary(), []

    def make_one(timeout_s: float, quick_s: float = 0.2) -> GrammarCompiler:
        limits = Limits(timeout_s=timeout_s, quick_s=quick_s, memory_bytes=256 << 20)
        setup = Setup(make_backend("llguidance"), words)
        made.append(GrammarCompiler("sleepy", lambda: setup, limits))
        return made[-1]

    yield make_one
    for compiler in made:
        compiler.close()


@pytest.fixture
def sleepy(make_sleepy) -> GrammarCompiler:
    """Patient enough that on the busiest machine nothing but what hangs is given up."""
    return make_sleepy(PATIENCE_S)


def test_a_grammar_that_takes_too_long_or_too_much_fails_alone(make_sleepy) -> None:
    sleepy = make_sleepy(1.0)
    hang, eat, die, fine = tickets = [
        sleepy.request(GrammarSpec("regex", text)) for text in ("hang", "eat", "die", "fine")
    ]
    wait(*tickets)

    assert "not compiled within 1 s" in str(hang.error)
    assert "256 MiB" in str(eat.error)
    assert "ended on it" in str(die.error)
    assert fine.error is None
    assert sleepy.stats.timeouts == 1
    assert sleepy.stats.restarts == 1


def test_time_is_that_of_the_processor(make_sleepy) -> None:
    ticket = make_sleepy(1.0).request(GrammarSpec("regex", "spin"))
    wait(ticket)

    assert "not compiled within 1 s" in str(ticket.error)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_compiling_makes_way_for_everything_else(make_sleepy) -> None:
    sleepy = make_sleepy(PATIENCE_S, quick_s=PATIENCE_S)
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hang = sleepy.request(GrammarSpec("regex", "hang"))
    pid = sleepy._life.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    policies: list[int] = []
    while os.SCHED_IDLE not in policies:
        with contextlib.suppress(ProcessLookupError):
            policies = [os.sched_getscheduler(int(p)) for p in children.read_text().split()]
        assert not hang.done

    assert os.getpriority(os.PRIO_PROCESS, sleepy._thread.native_id) == 10
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    sleepy.forget(hang)


def test_easy_grammars_do_not_wait_for_hard_ones(sleepy) -> None:
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hard = [sleepy.request(GrammarSpec("regex", "hang"))]
    easy = sleepy.request(GrammarSpec("regex", "easy"))
    wait(easy)

    assert easy.error is None
    assert not hard[0].done
    sleepy.forget(hard[0])  # nobody waits for it: it is stopped
    wait(sleepy.request(GrammarSpec("regex", "another")))
    assert not sleepy._life.owed


def test_a_lost_process_fails_those_who_wait_and_is_started_again(sleepy) -> None:
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hang = sleepy.request(GrammarSpec("regex", "hang"))
    while not sleepy._life.owed:
        os.sched_yield()
    os.kill(sleepy._life.process.pid, signal.SIGKILL)
    wait(hang)

    assert hang.error.status == 503
    assert compile_one(sleepy, "regex", "fine").error is None
    assert sleepy.stats.restarts == 2


def test_proofs_outlive_the_process_on_disk(tmp_path) -> None:
    first = make(store=tmp_path / "proofs")
    compile_one(first, "regex", "a+b")
    first.close()
    second = make(store=tmp_path / "proofs")

    ticket = compile_one(second, "regex", "a+b")
    second.close()

    assert accept(ticket.grammar.matcher(), b"ab")
    assert (second.stats.disk_hits, second.stats.restarts) == (1, 0)
    assert len(list((tmp_path / "proofs").iterdir())) == 1


def test_a_broken_file_on_disk_is_compiled_again(tmp_path) -> None:
    spec = GrammarSpec("regex", "a+b")
    (tmp_path / spec.digest).write_bytes(b"nonsense")
    compiler = make(store=tmp_path)

    ticket = compile_one(compiler, "regex", "a+b")
    compiler.close()

    assert ticket.error is None
    assert compiler.stats.disk_hits == 0
