"""A traced program: typed ops over virtual buffers and constants. Passes transform it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from sylvan.kernels.api import HostFunction, LinearWeight, Rows
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.schema import Op, operands, reads, writes

_TILE_ROWS = 32  # rows of a matrix tile; buffers are padded to whole tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Sizes of the program's buffers; `max_outputs` also limits the number of requests."""

    max_tokens: int
    max_outputs: int

    def max_rows(self, rows: Rows, times: int = 1) -> int:
        """Maximum number of rows, plus the rows that a tile may read beyond them."""
        most = self.max_tokens if rows == "tokens" else self.max_outputs
        most = -(-most * times // _TILE_ROWS) * _TILE_ROWS
        return most if times == 1 else most + _TILE_ROWS  # tiles of experts may start at any row


@operands
class HostCall(Op):
    """A call of a Python function between native ops.

    `function`: its number in the graph. `x_f32`: x is float32 although rows have another type.
    """

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    function: int
    cols: int
    x_f32: bool = False


@dataclass(slots=True)
class Graph:
    """Ops in the order in which they run.

    Attributes:
        dtype: Type of the model's rows.
        ops: The ops; their buffers are virtual (>= 0) or constants (~index).
        sizes: Bytes of each virtual buffer; 0: the caller binds it.
        inputs: Virtual buffers that the caller fills before a run.
        pinned: Virtual buffers that are kept to the end.
        constants: Memory that is the same in every step; None: the weight is not packed yet.
        weights: Matrices and stacks to pack, by constant.
        tables: Matrices to store as float32 rows, by constant.
        copies: Copies of the model's weights in the constants.
        functions: Functions that `HostCall` ops call.
    """

    limits: ProgramLimits
    dtype: torch.dtype
    ops: list[Op] = field(default_factory=list[Op])
    sizes: list[int] = field(default_factory=list[int])
    inputs: list[int] = field(default_factory=list[int])
    pinned: set[int] = field(default_factory=set[int])
    constants: list[Bytes | None] = field(default_factory=list["Bytes | None"])
    weights: dict[int, LinearWeight] = field(default_factory=dict[int, LinearWeight])
    tables: dict[int, LinearWeight] = field(default_factory=dict[int, LinearWeight])
    copies: list[WeightCopy] = field(default_factory=list[WeightCopy])
    functions: list[HostFunction] = field(default_factory=list[HostFunction])

    def buffer(self, num_bytes: int) -> int:
        """Add a virtual buffer."""
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def constant(self, data: Bytes | None) -> int:
        """Add memory that is the same in every step; return its reference."""
        self.constants.append(data)
        return ~(len(self.constants) - 1)

    def with_ops(self, ops: Iterable[Op]) -> Graph:
        """Copy the graph with other ops; buffers and constants added to the copy are not shared."""
        return replace(
            self,
            ops=list(ops),
            sizes=[*self.sizes],
            constants=[*self.constants],
            copies=[*self.copies],
        )
