"""Loading what was proved on idle cores: when it is done there, and who does it otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.compiler.cores import CoreWatch
from sylvan.runtime.features.grammar.compiler.loader import IdleLoader
from sylvan.runtime.features.grammar.compiler.messages import Proof
from sylvan.runtime.features.grammar.spec import GrammarSpec
from tests.support.grammar import accept, make_backend

BACKEND = make_backend("llguidance")
PROOF = Proof(id=1, data=BACKEND.compile(GrammarSpec("regex", "a+b")).dump(), on_idle=True)
TICKS = "cpu  {busy} 0 0 1000 0 0 0 0 0 0\n"


class Slow:
    """llguidance, once it is let."""

    loads_unlocked = True

    def __init__(self) -> None:
        self.let = threading.Event()
        self.policy = -1

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return BACKEND.compile(spec)

    def load(self, data: bytes) -> CompiledGrammar:
        if sys.platform == "linux":
            self.policy = os.sched_getscheduler(0)
        self.let.wait()
        return BACKEND.load(data)


class Bench:
    """A loader, the calls it posts, and what was kept."""

    def __init__(self, watch: CoreWatch) -> None:
        self.posts: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.loader = IdleLoader(self.posts.put, watch)
        self.kept: list[CompiledGrammar | None] = []

    def lend(self, backend, proof: Proof = PROOF) -> bool:
        return self.loader.lend(backend, proof, self.kept.append)


def watch_of(path: Path, *, busy: bool) -> CoreWatch:
    """One that finds the cores busy with others, or idle."""
    path.write_text(TICKS.format(busy=0))
    watch = CoreWatch(path)
    path.write_text(TICKS.format(busy=1_000_000 if busy else 0))
    time.sleep(0.06)
    return watch


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    bench = Bench(watch_of(tmp_path / "stat", busy=False))
    yield bench
    bench.loader.close()


def test_a_grammar_is_loaded_on_idle_cores(bench) -> None:
    slow = Slow()
    slow.let.set()
    assert bench.lend(slow)
    bench.posts.get()()

    (grammar,) = bench.kept
    assert accept(grammar.matcher(), b"aab")
    assert bench.loader.patience_s is None
    if sys.platform == "linux":
        assert slow.policy == os.SCHED_IDLE


def test_what_is_not_loaded_in_time_is_given_back_once(bench) -> None:
    slow = Slow()
    assert bench.lend(slow)
    assert bench.loader.overdue() == []
    while not (late := bench.loader.overdue()):
        time.sleep(bench.loader.patience_s)
    slow.let.set()
    bench.posts.get()()  # too late: nobody is told

    assert late == [bench.kept.append]
    assert bench.kept == []


def test_a_thread_that_may_have_to_wait_holds_no_lock(bench, tmp_path) -> None:
    locked = Slow()
    locked.loads_unlocked = False
    busy = Bench(watch_of(tmp_path / "other", busy=True))

    assert not bench.lend(locked)
    assert not bench.lend(Slow(), Proof(id=1, data=PROOF.data))  # not proved on idle cores
    assert not bench.lend(Slow(), Proof(id=1, data=b"x" * 100_000, on_idle=True))
    assert not busy.lend(Slow())
    assert bench.loader.patience_s is None


def test_only_other_processes_count(tmp_path) -> None:
    path = tmp_path / "stat"
    path.write_text(TICKS.format(busy=0))
    watch = CoreWatch(path)
    begun, own = time.monotonic(), time.process_time()
    while time.monotonic() < begun + 0.06:
        pass
    mine = int((time.process_time() - own) * os.sysconf("SC_CLK_TCK"))
    path.write_text(TICKS.format(busy=mine))

    assert watch.busy_with_others() == 0
    assert CoreWatch(tmp_path / "none").busy_with_others() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")
def test_what_helpers_take_is_not_taken_by_others(tmp_path) -> None:
    path = tmp_path / "stat"
    path.write_text(TICKS.format(busy=0))
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as helper:
        watch = CoreWatch(path, lambda: [helper.pid])
        helper.stdout.readline()
        taken = Path(f"/proc/{helper.pid}/stat").read_text().split()[13:15]
        path.write_text(TICKS.format(busy=sum(map(int, taken))))
        helped = watch.busy_with_others()
        helper.communicate(b"\n")

    assert helped < 0.1
