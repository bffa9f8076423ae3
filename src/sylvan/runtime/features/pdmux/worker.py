"""Worker half: computes prompts op by op, for a bounded time after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.graphs.split import SplitPrompt
from sylvan.runtime.features.pdmux.control import PrefillBetween
from sylvan.runtime.features.pdmux.work import (
    Fill,
    Filled,
    MuxEvents,
    MuxWork,
    Stop,
    Stopped,
)
from sylvan.utils.clock import Clock, monotonic


class InterleavedPrefillWorker(CapabilityWorker):
    """Runs parts of prompts while they fit into the time that a step may wait; at least one.

    The duration of a part is predicted from its last run and its number of rows.

    Args:
        make: Creates the program; called once the executor is built.
        wait_s: Longest time after each step.
    """

    name: ClassVar = PrefillBetween.name

    def __init__(
        self, make: Callable[[], SplitPrompt], wait_s: float, clock: Clock = monotonic
    ) -> None:
        self._make, self._wait_s, self._clock = make, wait_s, clock
        self._split: SplitPrompt | None = None
        self._jobs: deque[Fill] = deque()
        self._done = 0  # remaining tokens of the first job
        self._rows = 0  # rows in progress; 0: start the next rows
        self._part = 0
        self._spent = np.zeros(0)  # seconds per row, by part
        self._events: list[Filled | Stopped] = []

    def open(self) -> None:
        """Create the program.

        Raises:
            Unsupported: There is no step program, or not for the whole model.
        """
        self._split = self._make()
        self._spent = np.zeros(self._split.num_parts)

    def after_forward(self, step: StepContext, work: MuxWork) -> Report:
        return self.idle_step(work)

    def idle_step(self, work: MuxWork) -> Report:
        for item in work:
            match item:
                case Fill():
                    self._jobs.append(item)
                case Stop():
                    self._stop(item.job)
                case _:
                    pass
        self._advance()
        events, self._events = self._events, []
        found: MuxEvents | None = tuple(events) or None
        return lambda: found

    def _advance(self) -> None:
        assert self._split is not None
        began = self._clock()
        ran = False
        while self._jobs:
            if not self._rows and not self._begin(self._split, self._jobs[0]):
                continue
            now = self._clock()
            expected = self._spent[self._part] * self._rows
            if ran and now - began + expected > self._wait_s:
                return
            self._split.run(self._part)
            ran = True
            self._spent[self._part] = (self._clock() - now) / self._rows
            self._part += 1
            if self._part == self._split.num_parts:
                self._done += self._rows
                self._rows = self._part = 0

    def _begin(self, split: SplitPrompt, job: Fill) -> bool:
        """Start the next rows of a job; False if there are none, and it is complete."""
        left = job.ids[self._done :]
        if not len(left):
            self._end(Filled(job.job))
            return False
        some = left[: split.max_tokens]
        split.begin(some, job.start + self._done, job.pages)
        self._rows, self._part = len(some), 0
        return True

    def _stop(self, number: int) -> None:
        if self._jobs and self._jobs[0].job == number:
            self._end(Stopped(number, "it was stopped"))
            return
        for job in tuple(self._jobs):
            if job.job == number:
                self._jobs.remove(job)
                self._events.append(Stopped(number, "it was stopped"))

    def _end(self, event: Filled | Stopped) -> None:
        """End the first job."""
        self._jobs.popleft()
        self._done = self._rows = self._part = 0
        self._events.append(event)
