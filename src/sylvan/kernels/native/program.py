"""A compiled program that one native call replays."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from sylvan.kernels.api import Dtype, TracedTensor
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.graph import HostCall
from sylvan.kernels.native.layout import ProgramLayout
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.part import NativePart
from sylvan.kernels.native.schema import Op


class Program:
    """Runs the ops of segments `first` to `stop`, or some `ops`.

    Programs of one layout share buffers. Host calls divide it into parts, each of which is one
    library call.
    """

    def __init__(
        self,
        library: Library,
        layout: ProgramLayout,
        first: int = 0,
        stop: int | None = None,
        *,
        ops: Sequence[int] | None = None,
    ) -> None:
        self._layout = layout
        last = sys.maxsize if stop is None else stop
        found = [i for i, op in enumerate(layout.ops) if first <= op.segment < last]
        chosen = found if ops is None else ops
        self.ops: list[Op] = [layout.ops[i] for i in chosen]
        self._run = library.dll.sylvan_program_run
        self._bind = library.dll.sylvan_program_bind
        self._parts: list[_ChosenOps | HostCall] = []
        native: list[int] = []
        for index in chosen:
            op = layout.ops[index]
            if isinstance(op, HostCall):
                self._parts += [_ChosenOps(library, layout, native), op]
                native = []
            else:
                native.append(index)
        self._parts.append(_ChosenOps(library, layout, native))
        self._handles = [part.handle for part in self._parts if isinstance(part, _ChosenOps)]
        self._handle = self._handles[0]
        self._run_in_background = library.dll.sylvan_run_in_background
        self._whole = len(self._handles) == 1
        self._spent: list[np.ndarray] | None = None  # nanoseconds, while steps are measured
        self.num_measured = 0

    @property
    def calls_host(self) -> bool:
        """Whether there are host calls; then it cannot prepare inputs or sample."""
        return not self._whole

    def run(self, step: StepRun, context: object = None) -> int:
        """Compute a step; the GIL is released. The step's counts must fit what was traced.

        Args:
            step: Its counts and the addresses of its arrays.
            context: Passed to host calls.

        Returns the number of sampled rows without a valid token.
        """
        if self._spent is not None:
            return self._run_measured(step, context, self._spent)
        if self._whole:
            return self._run(self._handle, ctypes.byref(step))
        assert not step.inputs
        assert not step.sample
        for part in self._parts:
            if isinstance(part, HostCall):
                self._call(part, step.tokens, context)
            elif part.ops:
                self._run(part.handle, ctypes.byref(step))
        return 0

    def _call(self, op: HostCall, rows: int, context: object) -> None:
        x = self._view(op.x, rows, op.cols, "f32" if op.x_f32 else op.dtype)
        out = self._view(op.out, rows, padded(op.cols), op.dtype)
        out[:, : op.cols] = self._layout.functions[op.function](x, context)
        out[:, op.cols :] = 0

    def run_in_background(self) -> None:
        """Run concurrently with steps from now on, on threads of `sylvan_background_threads`.

        Without sampling; one such program runs at a time.
        """
        for handle in self._handles:
            self._run_in_background(handle)

    def number(self, value: TracedTensor) -> int:
        """Index of a value's memory, for `bind`."""
        return self._layout.home[value.id]

    def bind(self, number: int, address: int) -> None:
        """Bind a buffer or constant to another address for all later runs.

        The caller guarantees valid memory there: rows of `padded` columns, as many as are computed
        (a product with matrix tiles reads whole tiles, see `TILE_ROWS`).
        """
        for handle in self._handles:
            self._bind(handle, number, address)

    def read(self, value: TracedTensor, rows: int) -> torch.Tensor:
        """Return the first rows of a value, without copying; overwritten by the next run."""
        return self._view(value.id, rows, value.cols, value.dtype)

    def write(self, value: TracedTensor, matrix: torch.Tensor) -> None:
        """Fill the first rows of a value, and the padding of these rows with zeros."""
        rows = self._view(value.id, len(matrix), padded(value.cols), value.dtype)
        rows[:, : value.cols] = matrix
        rows[:, value.cols :] = 0

    def run_at(self, step: StepRun, *places: tuple[int, int]) -> int:
        """`bind` each number to its address, then `run`; of a program without host calls."""
        for number, address in places:
            self._bind(self._handle, number, address)
        return self._run(self._handle, ctypes.byref(step))

    def measure(self, *, on: bool) -> list[tuple[Op, int]]:
        """Start or stop measuring runs; returns each op with its nanoseconds so far.

        `num_measured` counts the runs.
        """
        found: list[tuple[Op, int]] = []
        for part, spent in zip(self._parts, self._spent or (), strict=False):
            ops = [part] if isinstance(part, HostCall) else part.ops
            found += zip(ops, spent.tolist(), strict=True)
        self._spent, self.num_measured = None, 0 if on else self.num_measured
        if on:
            sizes = (1 if isinstance(p, HostCall) else len(p.ops) for p in self._parts)
            self._spent = [np.zeros(size, np.int64) for size in sizes]
        return found

    def _run_measured(self, step: StepRun, context: object, spent: Sequence[np.ndarray]) -> int:
        self.num_measured += 1
        undrawn = 0
        for part, each in zip(self._parts, spent, strict=True):
            if isinstance(part, HostCall):
                start = time.perf_counter_ns()
                self._call(part, step.tokens, context)
                each[0] += time.perf_counter_ns() - start
            elif part.ops:
                step.profile = each.ctypes.data
                try:
                    undrawn = self._run(part.handle, ctypes.byref(step))
                finally:
                    step.profile = None
        return undrawn

    def profile(self, step: StepRun, context: object = None) -> list[tuple[Op, int]]:
        """Run once; return each op with its nanoseconds."""
        found: list[tuple[Op, int]] = []
        for part in self._parts:
            if isinstance(part, HostCall):
                start = time.perf_counter_ns()
                self._call(part, step.tokens, context)
                found.append((part, time.perf_counter_ns() - start))
                continue
            spent = np.zeros(len(part.ops), np.int64)
            step.profile = spent.ctypes.data
            try:
                self._run(part.handle, ctypes.byref(step))
            finally:
                step.profile = None
            found += zip(part.ops, spent.tolist(), strict=True)
        return found

    def _view(self, ref: int, rows: int, cols: int, dtype: Dtype) -> torch.Tensor:
        return _view(self._layout.memory[self._layout.home[ref]], rows, cols, dtype)


class _ChosenOps(NativePart):
    """Some ops of a program."""

    def __init__(self, library: Library, layout: ProgramLayout, chosen: Sequence[int]) -> None:
        limits = layout.limits
        max_rows = limits.max_tokens, limits.max_outputs
        super().__init__(library, layout.records_of(chosen), layout.memory, max_rows)
        self.ops = [layout.ops[i] for i in chosen]


def _view(memory: Bytes, rows: int, cols: int, dtype: Dtype) -> torch.Tensor:
    """The first rows of a buffer as a tensor, without copying. Shape: (rows, cols)."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    width = padded(cols)
    used = memory[: rows * width * kind.itemsize].view(np.int16 if kind.itemsize == 2 else np.int32)
    return torch.from_numpy(used).view(kind).view(rows, width)[:, :cols]
