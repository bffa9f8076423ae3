"""Places the values of a recorded program in as little memory as their lifetimes allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import COUNTS, OP, TYPES, Kind

Ref = int | None
"""Index into the constants (negative: ~index) or the virtual buffers (>= 0); None is absent."""


@dataclass(slots=True)
class Call:
    """A recorded op, its buffers still virtual."""

    kind: Kind
    count: str
    type: str
    buffers: tuple[Ref, ...]
    sizes: tuple[int, ...]
    scalars: tuple[float, ...] = ()
    times: int = 1  # rows for each of `count`


@dataclass(slots=True)
class Draft:
    """A program while it is recorded."""

    calls: list[Call] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of each virtual buffer
    inputs: list[int] = field(default_factory=list)  # filled by the caller before a run
    pinned: set[int] = field(default_factory=set)  # kept to the end
    constants: list[Bytes] = field(default_factory=list)

    def buffer(self, num_bytes: int) -> int:
        """A new virtual buffer."""
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def constant(self, data: Bytes) -> Ref:
        """A reference to memory that is the same in every step."""
        self.constants.append(data)
        return ~(len(self.constants) - 1)


@dataclass(frozen=True, slots=True)
class Placed:
    """Ops with real buffer numbers, and the memory of each number."""

    ops: np.ndarray
    memory: list[Bytes]
    home: Sequence[int]  # virtual buffer -> number


def place(draft: Draft) -> Placed:
    """Give each virtual buffer memory that no other living one has."""
    last = _last_uses(draft)
    memory = list(draft.constants)
    home = [-1] * len(draft.sizes)
    free: list[int] = []
    for ref in draft.inputs:
        home[ref] = _take(draft.sizes[ref], free, memory)
    for index, call in enumerate(draft.calls):
        mine = [ref for ref in call.buffers if ref is not None and ref >= 0]
        for ref in mine:
            if home[ref] < 0:
                home[ref] = _take(draft.sizes[ref], free, memory)
        free.extend(home[ref] for ref in set(mine) if last[ref] == index)
    ops = np.zeros(len(draft.calls), OP)
    for op, call in zip(ops, draft.calls, strict=True):
        _encode(op, call, home)
    return Placed(ops, memory, home)


def _last_uses(draft: Draft) -> list[int]:
    last = [-1] * len(draft.sizes)
    for index, call in enumerate(draft.calls):
        for ref in call.buffers:
            if ref is not None and ref >= 0:
                last[ref] = index
    for ref in (*draft.inputs, *draft.pinned):
        last[ref] = len(draft.calls)
    return last


def _take(num_bytes: int, free: list[int], memory: list[Bytes]) -> int:
    fitting = [i for i in free if memory[i].nbytes >= num_bytes]
    if fitting:
        best = min(fitting, key=lambda i: memory[i].nbytes)
        free.remove(best)
        return best
    memory.append(allocate(num_bytes))
    return len(memory) - 1


def _encode(op: np.void, call: Call, home: Sequence[int]) -> None:
    op["kind"], op["count"], op["times"] = call.kind, COUNTS.index(call.count), call.times
    op["type"] = TYPES.index(call.type)
    op["buf"] = -1
    for i, ref in enumerate(call.buffers):
        if ref is not None:
            op["buf"][i] = ~ref if ref < 0 else home[ref]
    op["n"][: len(call.sizes)] = call.sizes
    op["f"][: len(call.scalars)] = call.scalars
