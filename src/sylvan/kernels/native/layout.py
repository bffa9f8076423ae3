"""Plans the memory of a graph's buffers by their lifetimes, and serialises its ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.kernels.api import HostFunction
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.barriers import waits
from sylvan.kernels.native.binding import OP
from sylvan.kernels.native.copies import MatrixCopy, WeightCopy
from sylvan.kernels.native.graph import Graph, HostCall, ProgramLimits
from sylvan.kernels.native.opset import OPS
from sylvan.kernels.native.schema import ROW_TYPES, ROWS, Op, buffers_of, fields_of


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """Ops as the library reads them, and the memory of each entry of their buffer table."""

    ops: Sequence[Op]
    records: np.ndarray
    memory: list[Bytes]
    home: Sequence[int]  # virtual buffer -> entry
    copies: Sequence[WeightCopy]  # copies of the model's weights
    functions: Sequence[HostFunction]  # functions of host calls
    sizes: Sequence[int]  # maximum bytes of each virtual buffer
    limits: ProgramLimits

    @property
    def buffers(self) -> list[Bytes]:
        """Memory of the virtual buffers; nothing in it outlives a step."""
        return [self.memory[entry] for entry in sorted(set(self.home)) if entry >= 0]

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(c.packed.num_bytes for c in self.copies if isinstance(c, MatrixCopy))

    def entry(self, ref: int) -> int:
        """Index of the memory of a virtual buffer or a constant."""
        return ~ref if ref < 0 else self.home[ref]

    def records_of(self, chosen: Sequence[int]) -> np.ndarray:
        """Return the records of some ops, with barriers only among themselves."""
        records = self.records[list(chosen)]
        records["waits"] = waits([self.ops[i] for i in chosen], self.home, self.memory)
        return records


def plan_memory(graph: Graph) -> ProgramLayout:
    """Assign memory to each virtual buffer that no other live buffer uses."""
    last = _last_uses(graph)
    memory = [_packed(data) for data in graph.constants]
    home = [-1] * len(graph.sizes)
    free: list[int] = []
    for ref in graph.inputs:
        home[ref] = _take(graph.sizes[ref], free, memory)
    for index, op in enumerate(graph.ops):
        mine = [part.ref for part in buffers_of(op) if part.ref >= 0]
        for ref in mine:
            if home[ref] < 0:
                home[ref] = _take(graph.sizes[ref], free, memory)
        free.extend(home[ref] for ref in dict.fromkeys(mine) if last[ref] == index)
    records = np.zeros(len(graph.ops), OP)
    for record, op in zip(records, graph.ops, strict=True):
        if not isinstance(op, HostCall):
            _encode(record, op, home)
    records["waits"] = waits(graph.ops, home, memory)
    return ProgramLayout(
        graph.ops, records, memory, home, graph.copies, graph.functions, graph.sizes, graph.limits
    )


def _packed(data: Bytes | None) -> Bytes:
    assert data is not None, "a weight that has not been packed"
    return data


def _last_uses(graph: Graph) -> list[int]:
    last = [-1] * len(graph.sizes)
    for index, op in enumerate(graph.ops):
        for part in buffers_of(op):
            if part.ref >= 0:
                last[part.ref] = index
    for ref in (*graph.inputs, *graph.pinned):
        last[ref] = len(graph.ops)
    return last


def _take(num_bytes: int, free: list[int], memory: list[Bytes]) -> int:
    fitting = [i for i in free if memory[i].nbytes >= num_bytes]
    if fitting:
        best = min(fitting, key=lambda i: memory[i].nbytes)
        free.remove(best)
        return best
    memory.append(allocate(num_bytes))
    return len(memory) - 1


def _encode(record: np.void, op: Op, home: Sequence[int]) -> None:
    record["kind"], record["times"] = OPS.index(type(op)), op.times
    record["rows"], record["dtype"] = ROWS.index(op.rows), ROW_TYPES.index(op.dtype)
    numbers = record["operands"]
    for place, part in enumerate(fields_of(type(op))):
        value = part.of(op)
        if part.kind == "buffer":
            value = -1 if value is None else ~value if value < 0 else home[value]
        if part.kind == "float":
            numbers.view(np.float32)[place] = value
        else:
            numbers[place] = value
