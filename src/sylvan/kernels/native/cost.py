"""Memory traffic of a compiled program's ops, and their minimum time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.kernels.memory import allocate
from sylvan.kernels.native.graph import HostCall
from sylvan.kernels.native.layout import ProgramLayout
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.opset import Embed
from sylvan.kernels.native.schema import Op, buffers_of

_PROBE = 64 << 20  # bytes, beyond the caches of most machines
_LOOKED_UP = ("cos_sin", "q_scales")  # operands that are tables, of which one row is read per row


@dataclass(frozen=True, slots=True)
class OpCost:
    """Bytes of one op.

    Attributes:
        name: Name of the op, or of the PyTorch module.
        rows: The kind of rows that it processes.
        weight_bytes: Read once per step, whatever the rows; counts all experts, though few may be
        read.
        row_bytes: Read and written per row, without keys and values of the context and without
            table lookups.
    """

    name: str
    rows: str
    weight_bytes: int
    row_bytes: int

    def floor_us(self, bytes_per_s: float) -> float:
        """Microseconds to read the weights at this rate."""
        return self.weight_bytes / bytes_per_s * 1e6


def program_costs(layout: ProgramLayout, called: Sequence[tuple[str, int]] = ()) -> list[OpCost]:
    """Return one entry per op, in execution order.

    `called`: names and weight bytes of the functions of host calls.
    """
    return [_cost(op, layout, called) for op in layout.ops]


def _cost(op: Op, layout: ProgramLayout, called: Sequence[tuple[str, int]]) -> OpCost:
    weights = rows = 0
    for part in buffers_of(op):
        if part.ref >= 0:
            each = layout.sizes[part.ref] // layout.limits.max_rows(op.rows)
            rows += each * (2 if part.access == "update" else 1)
        elif part.access == "read" and part.name not in _LOOKED_UP and not isinstance(op, Embed):
            weights += layout.memory[~part.ref].nbytes
    name = type(op).__name__
    if isinstance(op, HostCall):
        name, weights = called[op.function]
        name = f"{name} (PyTorch)"
    return OpCost(name, op.rows, weights, rows)


def read_rate(library: Library) -> float:
    """Measure the memory bandwidth of all threads of the kernels, in bytes per second."""
    memory = allocate(_PROBE)
    memory[:] = 1
    library.dll.sylvan_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    best = min(_timed(library, memory.ctypes.data) for _ in range(4))
    return _PROBE / best


def _timed(library: Library, address: int) -> float:
    start = time.perf_counter()
    library.dll.sylvan_read(address, _PROBE)
    return time.perf_counter() - start


def describe_costs(costs: Sequence[OpCost], bytes_per_s: float) -> list[str]:
    """Format one line per op."""
    return [
        f"{cost.name:20} {cost.rows:8} weights {cost.weight_bytes:>13,} B  "
        f"rows {cost.row_bytes:>9,} B  floor {cost.floor_us(bytes_per_s):9.1f} us"
        for cost in costs
    ]
