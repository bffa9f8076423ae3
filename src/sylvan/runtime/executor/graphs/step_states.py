"""Slots of the recurrent states of a step's requests, as programs read them; numpy only."""

from __future__ import annotations

import numpy as np

from sylvan.kernels.native.binding import StepRun
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.host import BatchLimits
from sylvan.runtime.core.states import StateWork


class StepStates:
    """Arrays that native code reads, so they must not move. `limits`: the largest step."""

    def __init__(self, limits: BatchLimits) -> None:
        most = limits.max_reqs + limits.max_paths
        self._slots: IntArray = np.zeros(most, np.int32)
        self._first_saves: IntArray = np.zeros(most + 1, np.int32)
        self._saves: IntArray = np.zeros((1, 2), np.int32)  # rows of the request, slot
        self._any = False  # whether any request has saves

    def bind(self, step: StepRun, work: StateWork) -> None:
        """Point `step` at the states named by `work`; valid until the next call."""
        count = len(work.slots)
        self._slots[:count] = work.slots
        if work.saves or self._any:
            saves = np.array(sorted(work.saves), np.int32).reshape(-1, 3)
            ends = np.searchsorted(saves[:, 0], np.arange(count + 1))
            self._first_saves[: count + 1] = ends
            self._first_saves[count + 1 :] = 0
            self._saves = np.ascontiguousarray(saves[:, 1:])
            self._any = bool(work.saves)
        step.state_slots = self._slots.ctypes.data
        step.first_saves = self._first_saves.ctypes.data
        step.saves = self._saves.ctypes.data
