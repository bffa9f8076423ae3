"""The cost of a step, including the gap before it if the previous step had the same requests."""

from __future__ import annotations

import pytest

from sylvan.protocol.messages import DraftCounts
from sylvan.runtime.core.req import Batch, Draft, Req, Slice
from sylvan.runtime.features.speculation.balance import PROBE, REST, WINDOW
from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.utils.clock import VirtualClock
from tests.support.kv import request


class Steps:
    def __init__(self):
        self.clock, self.costs = VirtualClock(), StepCosts()
        self.timer = StepTimer(self.costs, self.clock)

    def step(self, *reqs, drafted=0, planning=0.0, besides=0.0, drafting=0.0):
        self.clock.advance(planning)
        if besides:
            self.clock.advance(besides)
            self.timer.other_work(besides)
        draft = Draft((1,) * drafted, tuple(range(-1, drafted - 1))) if drafted else None
        self.timer.begin(Batch(tuple(Slice(req, 2, 3, True, draft) for req in reqs)))
        self.clock.advance(1.0 + 0.1 * drafted + drafting)
        self.timer.end(drafting)


def test_planning_counts_and_what_is_counted_elsewhere_does_not():
    steps, req = Steps(), Req(request("a", [1, 2]))
    steps.step(req)
    for _ in range(8):
        steps.step(req, planning=0.25, besides=3.0, drafting=2.0)
    for _ in range(8):
        steps.step(req, drafted=4, planning=0.5)

    assert steps.costs.seconds(1) == pytest.approx(1.25)
    assert steps.costs.seconds(5) == pytest.approx(1.9)


def test_time_saved_by_drafts_is_reported():
    steps, req = Steps(), Req(request("a", [1, 2]))
    for _ in range(9):
        steps.step(req)
    assert steps.timer.saved_s == 0
    steps.step(req, drafted=4)
    assert steps.timer.saved_s == pytest.approx(-0.4)
    req.drafts = DraftCounts().verified(4, 3)
    steps.step(req)
    assert steps.timer.saved_s == pytest.approx(-0.4 + 3 * 1.0)
    steps.step(req, drafting=0.5)
    assert steps.timer.saved_s == pytest.approx(2.1)


def test_time_without_requests_does_not_count():
    steps, first, second = Steps(), Req(request("a", [1])), Req(request("b", [1]))
    steps.step(first)
    for _ in range(8):
        steps.step(first, planning=0.25)
        steps.step(second, planning=100.0)
        steps.step(second, planning=0.25)
        steps.step(first, planning=100.0)
    assert steps.costs.seconds(1) == pytest.approx(1.25)


def test_drafting_that_loses_time_all_in_all_ends_for_a_while():
    steps, req = Steps(), Req(request("a", [1, 2]))
    for _ in range(1 + PROBE):
        steps.step(req)
    taken = []
    for _ in range(WINDOW + REST + 1):
        taken.append(steps.timer.drafting_pays)
        steps.timer.looked = steps.timer.drafting_pays
        steps.step(req, planning=0.1 if steps.timer.looked else 0.0)

    assert taken == [True] * WINDOW + [False] * REST + [True]


def test_steps_that_are_passed_over_say_nothing():
    steps, req = Steps(), Req(request("a", [1, 2]))
    for _ in range(9):
        steps.step(req)
    steps.timer.skip_timing()
    steps.clock.advance(50.0)
    steps.timer.end()
    steps.step(req, planning=50.0)
    steps.step(req)

    assert steps.costs.seconds(1) == pytest.approx(1.0)
