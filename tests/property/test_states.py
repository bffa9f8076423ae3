"""Recurrent states: whatever is cached, chunked or preempted, each stands for its tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.support.scheduler_inputs import setups
from tests.support.scheduler_machine import SchedulerMachine


class RecurrentScheduler(SchedulerMachine):
    """Models with recurrent layers, which have few slots for states."""

    @initialize(setup=setups(states=st.sampled_from([30, 9, 6, 3, 2])))
    def begin(self, setup):
        self.start(setup)


TestRecurrentScheduler = RecurrentScheduler.TestCase
TestRecurrentScheduler.settings = settings(
    max_examples=30, stateful_step_count=40, report_multiple_bugs=False
)
