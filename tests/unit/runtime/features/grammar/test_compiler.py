"""Compiling in a process of its own: limits, lanes, what is kept, and what is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sylvan.runtime.features.grammar.cache import GrammarStore
from sylvan.runtime.features.grammar.compiler.client import CompilerSetup, GrammarCompiler, Ticket
from sylvan.runtime.features.grammar.compiler.pool import NICENESS, PROGRAM, CompileOrder, pack
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.spec import MAX_DEPTH, MAX_TEXT_BYTES, GrammarSpec
from sylvan.runtime.features.grammar.wire import preparation
from tests.support.grammar import accept, allowed, vocabulary

PATIENCE_S = 120.0


def make(limits: Limits | None = None, store: Path | None = None) -> GrammarCompiler:
    words = vocabulary()

    def setup() -> CompilerSetup:
        return CompilerSetup(Loaders(words, limits), GrammarStore(store) if store else None)

    limits = limits or Limits()
    return GrammarCompiler("llguidance", setup, limits)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make()
    yield compiler
    compiler.close()


def wait(*tickets: Ticket) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not all(t.done for t in tickets):
        assert time.monotonic() < give_up, "a grammar is never done"
        time.sleep(0.002)


def compile_one(compiler: GrammarCompiler, kind: str, text: str) -> Ticket:
    ticket = compiler.request(GrammarSpec(kind, text))
    wait(ticket)
    compiler.forget(ticket)
    return ticket


def test_a_grammar_comes_back_ready(compiler) -> None:
    ticket = compile_one(compiler, "regex", "a+b")

    assert ticket.error is None
    assert accept(ticket.grammar.grammar.matcher(), b"aab")
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
    ("regex", "(((((((a{30}){30}){30}){30}){30}){30}){30}){30}", "too many"),
    ("ebnf", "root ::= root", "no text"),
    ("ebnf", "root ::= \0", "NUL"),
    ("structural_tag", "[]", "must be an object"),
]


def test_bad_grammars_are_refused_and_the_next_is_served() -> None:
    compiler = make(Limits(quick_s=Limits().timeout_s))  # the hard ones are not tried twice
    for kind, text, reason in BAD:
        ticket = compile_one(compiler, kind, text)
        assert ticket.error is not None, (kind, text[:50])
        assert (ticket.error.status, ticket.error.param) == (400, kind)
        assert reason in str(ticket.error)

    assert compile_one(compiler, "regex", "fine").error is None
    assert compiler.stats.restarts == 1
    compiler.close()


def test_states_are_limited(compiler) -> None:
    """A state of this regex depends on the last 40 characters."""
    text = bytes(random.Random(1).choices(b"ab", k=300))
    few, regex = make(Limits(max_states=100)), "(a|b)*a(a|b){40}"
    try:
        wide, tight = (
            compile_one(c, "regex", regex).grammar.grammar.matcher() for c in (compiler, few)
        )
    finally:
        few.close()

    assert all(byte in allowed(wide) and wide.accept(byte) for byte in text)
    assert wide.error() == ""
    assert not all(byte in allowed(tight) and tight.accept(byte) for byte in text)
    assert "too many states" in tight.error()
    assert "grammar.max_states" in tight.error()


def test_a_refusal_is_remembered(compiler) -> None:
    first = compile_one(compiler, "regex", "(a")
    again = compiler.request(GrammarSpec("regex", "(a"))

    assert again.done
    assert str(again.error) == str(first.error)


@pytest.mark.slow
def test_many_bad_grammars_leave_nothing_behind(compiler) -> None:
    first = [
        compiler.request(GrammarSpec(BAD[i % 5][0], f"{BAD[i % 5][1]}-{i}")) for i in range(10)
    ]
    wait(*first)  # so that pools have as many threads as they ever get, however busy the machine is
    for ticket in first:
        compiler.forget(ticket)
    gc.collect()
    # what earlier tests left in this process may end meanwhile: fewer is no leak
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(120):
        kind, text, _ = BAD[i % 5]
        assert compile_one(compiler, kind, f"{text}{i}").error is not None
    gc.collect()

    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not compiler._underway
    assert not compiler._pool._futures
    pid = compiler._pool.pid
    assert Path(f"/proc/{pid}/task/{pid}/children").read_text().split() == []


SLEEPY = '''
"""Stands in for a library: texts say what compiling them does."""
import os, time
from sylvan.runtime.features.grammar.backends import llguidance


class BACKEND(llguidance.LLGuidance):
    def compile(self, spec):
        while spec.text == "hang":
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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words, made = vocabulary(), []

    def make_one(timeout_s: float, quick_s: float = 0.2) -> GrammarCompiler:
        limits = Limits(timeout_s=timeout_s, quick_s=quick_s, memory_bytes=256 << 20)
        setup = CompilerSetup(Loaders(words, limits))
        made.append(GrammarCompiler("sleepy", lambda: setup, limits))
        return made[-1]

    yield make_one
    for compiler in made:
        compiler.close()


@pytest.fixture
def sleepy(make_sleepy) -> GrammarCompiler:
    """Patient enough that on the busiest machine nothing but what hangs is given up."""
    return make_sleepy(PATIENCE_S)


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_or_too_much_fails_alone(make_sleepy) -> None:
    sleepy = make_sleepy(0.5)
    hang, eat, die, fine = tickets = [
        sleepy.request(GrammarSpec("regex", text)) for text in ("hang", "eat", "die", "fine")
    ]
    wait(*tickets)

    assert "not compiled within 0.5 s" in str(hang.error)
    assert "256 MiB" in str(eat.error)
    assert "ended on it" in str(die.error)
    assert fine.error is None
    assert sleepy.stats.timeouts == 1
    assert sleepy.stats.restarts == 1


def test_time_is_that_of_the_processor(make_sleepy) -> None:
    ticket = make_sleepy(0.5).request(GrammarSpec("regex", "spin"))
    wait(ticket)

    assert "not compiled within 0.5 s" in str(ticket.error)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_compiling_makes_way_for_everything_else(make_sleepy) -> None:
    sleepy = make_sleepy(PATIENCE_S, quick_s=PATIENCE_S)
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hang = sleepy.request(GrammarSpec("regex", "hang"))
    pid = sleepy._pool.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found: list[int] = []
    while not found:
        with contextlib.suppress(ProcessLookupError):
            numbers = map(int, children.read_text().split())
            found = [os.getpriority(os.PRIO_PROCESS, child) for child in numbers]
        assert not hang.done

    assert found == [os.getpriority(os.PRIO_PROCESS, pid)]
    assert found[0] >= NICENESS
    (thread,) = sleepy._thread._threads
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) >= NICENESS
    sleepy.forget(hang)


def test_easy_grammars_do_not_wait_for_hard_ones(sleepy) -> None:
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hard = [sleepy.request(GrammarSpec("regex", "hang"))]
    easy = sleepy.request(GrammarSpec("regex", "easy"))
    wait(easy)

    assert easy.error is None
    assert not hard[0].done
    sleepy.forget(hard[0])  # no request waits for it: it is stopped
    wait(sleepy.request(GrammarSpec("regex", "another")))
    assert not sleepy._pool._futures


def test_a_lost_process_fails_those_who_wait_and_is_started_again(make_sleepy) -> None:
    sleepy = make_sleepy(PATIENCE_S, quick_s=PATIENCE_S)
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    hang = sleepy.request(GrammarSpec("regex", "hang"))
    while not sleepy._pool._futures:
        time.sleep(0.002)
    os.kill(sleepy._pool.pid, signal.SIGKILL)
    wait(hang)

    assert hang.error.status == 503
    assert compile_one(sleepy, "regex", "fine").error is None
    assert sleepy.stats.restarts == 2


def test_compiled_grammars_outlive_the_process_on_disk(tmp_path) -> None:
    first = make(store=tmp_path / "kept")
    compile_one(first, "regex", "a+b")
    first.close()
    second = make(store=tmp_path / "kept")

    ticket = compile_one(second, "regex", "a+b")
    second.close()

    assert accept(ticket.grammar.grammar.matcher(), b"ab")
    assert (second.stats.disk_hits, second.stats.restarts) == (1, 0)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_broken_file_on_disk_is_compiled_again(tmp_path) -> None:
    spec = GrammarSpec("regex", "a+b")
    (tmp_path / spec.digest).write_bytes(b"nonsense")
    compiler = make(store=tmp_path)

    ticket = compile_one(compiler, "regex", "a+b")
    compiler.close()

    assert ticket.error is None
    assert compiler.stats.disk_hits == 0


FORKLESS = """
import os, sys
if "sylvan.runtime.features.grammar.compiler.process" in sys.orig_argv:
    fork, refused = os.fork, [BlockingIOError(11, "Resource temporarily unavailable")] * 3
    os.fork = lambda: fork() if not refused else (_ for _ in ()).throw(refused.pop())
"""


def test_a_system_without_a_process_to_spare_is_asked_again(monkeypatch, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORKLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    compiler = make()
    tickets = [compiler.request(GrammarSpec("regex", f"a{i}")) for i in range(6)]
    wait(*tickets)
    compiler.close()

    assert [t.error for t in tickets] == [None] * 6
    assert compiler.stats.restarts == 1


def test_a_process_whose_answers_are_not_read_ends_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    prepare = pack(preparation("llguidance", vocabulary(), Limits()))
    order = pack(CompileOrder(id=1, kind="regex", text="a"))
    with os.fdopen(writer, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    assert process.stdin is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):  # it ends while its orders stay open
        process.stdin.write(prepare + order)
        process.stdin.flush()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()

    assert said == b""


def test_closing_does_not_wait_for_what_hangs(make_sleepy) -> None:
    """It waits neither for a grammar nor for an unresponsive process."""
    sleepy = make_sleepy(PATIENCE_S, quick_s=PATIENCE_S)
    wait(sleepy.request(GrammarSpec("regex", "warm")))
    os.kill(sleepy._pool.pid, signal.SIGSTOP)
    late = [sleepy.request(GrammarSpec("regex", "x" * 100_000 + str(i))) for i in range(3)]
    begun = time.monotonic()
    sleepy.close()

    assert time.monotonic() - begun < PATIENCE_S / 2
    assert not any(t.done and t.error is None for t in late)
    assert sleepy._pool.pid is None


def test_an_error_of_ours_ends_its_grammar_only(compiler, monkeypatch, caplog) -> None:
    """No request waits forever, and the log has the reason."""
    wait(compiler.request(GrammarSpec("regex", "warm")))
    guard = compiler._guard
    monkeypatch.setattr(compiler, "_guard", lambda *_: 1 // 0)
    ticket = compiler.request(GrammarSpec("regex", "a+"))
    wait(ticket)
    monkeypatch.setattr(compiler, "_guard", guard)

    assert ticket.error.status == 500
    assert "ZeroDivisionError" in caplog.text
    assert compile_one(compiler, "regex", "fine").error is None
