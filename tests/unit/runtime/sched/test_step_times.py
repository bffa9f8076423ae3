"""Each second of a scheduler is accounted for once."""

from __future__ import annotations

import pytest

from sylvan.protocol.steps import read_steps
from sylvan.runtime.core.req import Batch, Phase, Req, Slice
from sylvan.runtime.sched.step_times import StepTimes
from sylvan.utils.clock import VirtualClock
from tests.support.kv import request


class Requests:
    """A table whose sizes are enough."""

    running: tuple[Req, ...] = ()
    waiting: tuple[Req, ...] = ()


@pytest.fixture
def clock():
    return VirtualClock(100.0)


@pytest.fixture
def times(clock):
    return StepTimes(clock, Requests())


def batch(stop=5):
    req = Req(request("r", [1, 2, 3, 4, 5]))
    req.phase = Phase.RUNNING
    return Batch((Slice(req, 0, stop, samples=True),))


def test_steps_bubbles_and_idleness_add_up(times, clock):
    times.planning()
    clock.advance(2.0)  # nothing came
    times.planning()
    times.launching(batch(), 0)
    clock.advance(3.0)
    times.completed()
    clock.advance(0.5)  # the scheduler thinks
    times.planning()
    times.launching(batch(), 0)
    clock.advance(1.0)
    times.completed()
    clock.advance(0.25)
    times.nothing_to_do()
    clock.advance(4.0)
    times.planning()
    times.launching(batch(), 0)
    assert (times.forward_s, times.bubble_s, times.idle_s) == (4.0, 0.75, 6.0)
    assert times.last_s == 1.0
    assert times.prompt_tokens == 15


def test_steps_that_overlap_count_once(times, clock):
    times.planning()
    times.launching(batch(), 0)
    clock.advance(1.0)
    times.planning()
    times.launching(batch(), 0)
    clock.advance(1.0)
    times.completed()
    clock.advance(1.0)
    times.completed(failed=True)
    assert (times.forward_s, times.bubble_s) == (3.0, 0.0)
    first, second = read_steps(times.log.buffer)
    assert (first.completed_s, second.completed_s) == (102.0, 103.0)
    assert (first.failed, second.failed) == (False, True)
    assert times.last_s == 1.0


def test_steps_without_slices_are_no_steps(times, clock):
    times.planning()
    times.launching(Batch(()), 0)
    clock.advance(1.0)
    assert times.completed() == 101.0
    assert read_steps(times.log.buffer) == []
    assert times.forward_s == 0
