"""A compiled program that one native call replays."""

from __future__ import annotations

import ctypes
import sys
import weakref

import numpy as np
import torch

from sylvan.kernels.api import TracedTensor
from sylvan.kernels.native.binding import Run
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.layout import Layout
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.schema import Op
from sylvan.kernels.native.tracer import view


class Program:
    """The ops of segments `first` to `stop`. Programs of one layout share its buffers."""

    def __init__(
        self, library: Library, layout: Layout, first: int = 0, stop: int | None = None
    ) -> None:
        self._layout = layout
        last = sys.maxsize if stop is None else stop
        chosen = [i for i, op in enumerate(layout.ops) if first <= op.segment < last]
        self.ops: list[Op] = [layout.ops[i] for i in chosen]
        records = np.ascontiguousarray(layout.records[chosen])
        table = (ctypes.c_void_p * len(layout.memory))(*(m.ctypes.data for m in layout.memory))
        self._run = library.dll.sylvan_program_run
        self._bind = library.dll.sylvan_program_bind
        self._handle = library.dll.sylvan_program_new(
            records.ctypes.data, len(records), ctypes.addressof(table), len(layout.memory)
        )
        weakref.finalize(self, library.dll.sylvan_program_free, self._handle)

    def run(self, step: Run) -> int:
        """Compute a step; the GIL is released. The step's counts must fit what was traced.

        Returns how many of the rows that were sampled had no possible token.
        """
        return self._run(self._handle, ctypes.byref(step))

    def number(self, value: TracedTensor) -> int:
        """Of a value's memory, for `bind`."""
        return self._layout.home[value.id]

    def bind(self, number: int, address: int) -> None:
        """Have all later runs find a buffer or constant at another address.

        The caller vouches for what lies there: rows of `padded` columns, as many as are computed
        (a product with matrix tiles reads whole tiles, see `TILE_ROWS`).
        """
        self._bind(self._handle, number, address)

    def read(self, value: TracedTensor, rows: int) -> torch.Tensor:
        """The first rows of a value, without copying; overwritten by the next run."""
        memory = self._layout.memory[self._layout.home[value.id]]
        return view(memory, rows, value.cols, value.dtype)

    def write(self, value: TracedTensor, matrix: torch.Tensor) -> None:
        """Fill the first rows of a value, and the padding of these rows with zeros."""
        memory = self._layout.memory[self._layout.home[value.id]]
        rows = view(memory, len(matrix), padded(value.cols), value.dtype)
        rows[:, : value.cols] = matrix
        rows[:, value.cols :] = 0

    def run_at(self, step: Run, *places: tuple[int, int]) -> int:
        """`bind` each number to its address, then `run`."""
        for number, address in places:
            self._bind(self._handle, number, address)
        return self._run(self._handle, ctypes.byref(step))

    def profile(self, step: Run) -> list[tuple[Op, int]]:
        """Run once and return each op with its nanoseconds."""
        spent = np.zeros(len(self.ops), np.int64)
        step.profile = spent.ctypes.data
        try:
            self.run(step)
        finally:
            step.profile = None
        return [(op, int(ns)) for op, ns in zip(self.ops, spent, strict=True)]
