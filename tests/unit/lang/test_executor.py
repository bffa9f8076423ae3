from __future__ import annotations

import re
import threading
import time
import warnings

import pytest

from sylvan import lang as sgl
from sylvan.lang import ir
from sylvan.lang.pool import WorkerPool
from sylvan.lang.settings import global_config


@pytest.fixture
def small_pool():
    """A pool of one thread, so that anything that waits for another thread would hang."""
    before, global_config.workers = global_config.workers, WorkerPool(max_threads=1)
    yield global_config.workers
    global_config.workers = before


class Gate:
    """An answer that waits until it is let through."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, text):
        self.reached.set()
        assert self.open.wait(10)
        return "late"


def test_appending_does_not_wait_for_the_model():
    gate = Gate()

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        assert gate.reached.wait(10)  # the gen runs before its result is requested
        assert "x" not in s
        gate.open.set()
        return s["x"]

    assert program.run(backend=sgl.Scripted(gate)).ret_value == "late"


def test_without_threads_nodes_run_where_they_are_appended():
    threads = []

    def answer(text):
        threads.append(threading.get_ident())
        return "x"

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        assert len(threads) == 1

    program.run(backend=sgl.Scripted(answer), use_thread=False)
    assert threads == [threading.get_ident()]


def test_without_threads_errors_are_raised_at_the_line():
    def answer(text):
        raise OSError("down")

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        raise AssertionError

    with pytest.raises(sgl.ProgramError, match="down"):
        program.run(backend=sgl.Scripted(answer), use_thread=False)


def test_errors_name_the_programs_line_and_keep_the_cause():
    def answer(text):
        raise OSError("down")

    @sgl.function
    def program(s):
        s += "some text"
        s += sgl.gen("broken")  # this line
        s += sgl.gen("after")

    state = program.run(backend=sgl.Scripted(answer))

    error = state.error()
    assert isinstance(error, sgl.ProgramError)
    assert isinstance(error.__cause__, OSError)
    assert f"{__file__}:" in str(error)
    assert 's += sgl.gen("broken")  # this line' in str(error)
    for read in (lambda: state["broken"], lambda: state["after"], state.text, state.messages):
        with pytest.raises(sgl.ProgramError, match="down"):
            read()


def test_results_before_the_error_can_be_read():
    answers = iter(["fine"])

    @sgl.function
    def program(s):
        s += sgl.gen("first") + sgl.gen("second")

    state = program.run(backend=sgl.Scripted(lambda text: next(answers)))

    assert state["first"] == "fine"
    with pytest.raises(sgl.ProgramError, match="StopIteration"):
        state["second"]


def test_bad_sampling_values_fail_the_program_with_the_field():
    @sgl.function
    def program(s):
        s += sgl.gen("x", temperature=-1)

    with pytest.raises(sgl.ProgramError, match="temperature"):
        program.run(backend=sgl.Scripted()).text()


def test_full_pool_does_not_block_programs_that_wait_for_each_other(small_pool):
    @sgl.function
    def leaf(s, i):
        s += f"{i}" + sgl.gen("x")

    @sgl.function
    def program(s):
        forks = s.fork(8)
        forks += sgl.gen("a")
        inner = [leaf.run(i, backend=backend)["x"] for i in range(3)]
        forks.join("concate_and_append")
        s += "".join(inner)

    backend = sgl.Scripted("y")
    states = program.run_batch([{}] * 6, backend=backend, num_threads=6)

    assert [state.text() for state in states] == ["y" * 11] * 6
    assert small_pool.peak_threads == 1


def test_get_var_and_sync_time_out():
    gate = Gate()

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        with pytest.raises(TimeoutError):
            s.get_var("x", timeout=0.01)
        with pytest.raises(TimeoutError):
            s.sync(timeout=0.01)
        gate.open.set()

    assert program.run(backend=sgl.Scripted(gate))["x"] == "late"


def test_cancel_wakes_readers_and_drops_the_rest():
    gate = Gate()
    backend = sgl.Scripted(gate)

    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.gen("y")
        assert gate.reached.wait(10)
        s.cancel()
        with pytest.raises(sgl.ProgramCancelledError):
            s.get_var("x")
        gate.open.set()

    state = program.run(backend=backend)

    assert isinstance(state.error(), sgl.ProgramCancelledError)
    assert [call.kind for call in backend.calls] == ["generate"]


def test_cancelling_one_fork_leaves_the_others():
    gate = Gate()

    def answer(text):
        return gate(text) if text.endswith("slow") else "quick"

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += ["slow", "fast"]
        forks += sgl.gen("x")
        assert forks[1]["x"] == "quick"
        forks[0].cancel()
        gate.open.set()
        with pytest.raises(sgl.ProgramCancelledError):
            forks[0]["x"]
        s += forks[1]["x"]

    assert program.run(backend=sgl.Scripted(answer)).text() == "quick"


def test_program_timeout_ends_the_program():
    gate = Gate()

    @sgl.function(timeout=0.02)
    def program(s):
        s += sgl.gen("x")
        s += sgl.gen("y")

    backend = sgl.Scripted(lambda text: (gate.open.wait(0.05), "slow")[1])
    state = program.run(backend=backend)

    assert isinstance(state.error(), sgl.ProgramTimeoutError)
    assert len(backend.calls) == 1


def test_context_variables_of_the_caller_are_seen_by_the_backend():
    import contextvars

    who = contextvars.ContextVar("who", default="nobody")
    who.set("caller")

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        s.sync(timeout=10)  # with a timeout the pool runs it, not this thread

    assert program.run(backend=sgl.Scripted(lambda text: who.get()))["x"] == "caller"


def test_many_parallel_programs_use_bounded_threads():
    before, global_config.workers = global_config.workers, WorkerPool(max_threads=8)
    try:

        @sgl.function
        def program(s, i):
            s += f"{i}: " + sgl.gen("a")
            forks = s.fork(4)
            forks += sgl.gen("b")
            forks.join()

        count = threading.active_count()
        peak = []
        backend = sgl.Scripted(lambda text: (peak.append(threading.active_count()), "t")[1])
        states = program.run_batch([{"i": i} for i in range(256)], backend=backend, num_threads=16)

        assert [state["b"] for state in states] == [["t"] * 4] * 256
        assert max(peak) <= count + 16 + 8
    finally:
        global_config.workers = before


def test_a_program_leaves_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @sgl.function
        def program(s):
            s += sgl.gen("x")

        program.run(backend=sgl.Scripted())


def test_names_that_programs_written_for_sglang_read():
    gate = Gate()

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = program.run(backend=sgl.Scripted(gate), stream=True)
    assert not state.stream_executor.is_finished
    gate.open.set()
    give_up = time.monotonic() + 10
    while not state.stream_executor.is_finished:
        assert time.monotonic() < give_up

    assert state.stream_executor.variables["x"] == "late"
    assert state.stream_executor.is_finished


@pytest.mark.parametrize(
    ("name", "text"), [("INT", "-12"), ("FLOAT", "3.5"), ("BOOL", "True"), ("STR", '"a b"')]
)
def test_patterns_of_types_are_named(name, text):
    assert re.fullmatch(getattr(ir, f"REGEX_{name}"), text)
