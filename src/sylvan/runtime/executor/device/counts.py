"""Counts of generated token ids on the device, kept only for requests with a penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.platform.api import Platform

_FIRST_ROWS = 8


class DeviceCounts:
    """Token counts: rows of a matrix (C, V) that grows by doubling. Row 0 is a dummy.

    Rows are assigned on the host at once; the returned work updates the device.
    """

    def __init__(self, platform: Platform, vocab_size: int) -> None:
        self._platform = platform
        self._vocab_size = vocab_size
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = 1
        self.matrix = torch.zeros(1, vocab_size, device=platform.device)

    def open(self, slot: int, outputs: IntArray) -> Callable[[], None]:
        """Start counting for `slot`, including `outputs`."""
        if not self._free:
            more = max(_FIRST_ROWS, self._rows)
            self._free = list(range(self._rows + more - 1, self._rows - 1, -1))
            self._rows += more
        row, rows = self._free.pop(), self._rows
        self._row_of[slot] = row
        ids = self._platform.pinned(len(outputs), torch.int64)
        ids.numpy()[:] = outputs

        def work() -> None:
            if rows > len(self.matrix):
                grown = torch.zeros(rows, self._vocab_size, device=self._platform.device)
                grown[: len(self.matrix)] = self.matrix
                self.matrix = grown
            index = ids.to(self._platform.device, non_blocking=True)
            ones = torch.ones(len(ids), device=self._platform.device)
            self.matrix[row].zero_().index_add_(0, index, ones)

        return work

    def drop(self, slot: int) -> None:
        """Stop counting for `slot`."""
        if (row := self._row_of.pop(slot, None)) is not None:
            self._free.append(row)

    def rows(self, slots: IntArray) -> IntArray:
        """Return the row of each slot in the matrix; -1: nothing is counted for it."""
        if not self._row_of:
            return np.full(len(slots), -1, np.int32)
        return np.array([self._row_of.get(slot, -1) for slot in slots.tolist()], np.int32)

    def add(self, count_rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Increment the count of ids[i] in count_rows[i]; call inside `Stream.run`."""
        index = count_rows.clamp_min(0).long(), ids.clamp_min(0).long()
        ones = torch.ones(len(ids), device=ids.device)
        self.matrix.index_put_(index, ones, accumulate=True)

    def correct(self, changes: Sequence[tuple[int, int, float]]) -> Callable[[], None] | None:
        """Return work that adds amounts to (slot, id) counts; None if there are no changes."""
        known = [(self._row_of[s], i, x) for s, i, x in changes if s in self._row_of and i >= 0]
        if not known:
            return None
        where = self._platform.pinned(2 * len(known), torch.int64).view(2, -1)
        value = self._platform.pinned(len(known), torch.float32)
        where.numpy()[:] = [[row for row, _, _ in known], [i for _, i, _ in known]]
        value.numpy()[:] = [x for _, _, x in known]

        def work() -> None:
            rows, ids = where.to(self._platform.device, non_blocking=True)
            amount = value.to(self._platform.device, non_blocking=True)
            self.matrix.index_put_((rows, ids), amount, accumulate=True)

        return work
