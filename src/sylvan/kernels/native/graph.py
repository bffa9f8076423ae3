"""A traced program: typed ops over virtual buffers and constants. Passes make another one of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from sylvan.kernels.api import HostFunction, LinearWeight, Rows
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.schema import Op, operands, reads, writes

_TILE_ROWS = 32  # rows of a matrix tile: buffers are long enough for the last one to be whole


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Sizes of the program's buffers; `max_outputs` also limits the number of requests."""

    max_tokens: int
    max_outputs: int

    def most_rows(self, rows: Rows, times: int = 1) -> int:
        """Maximum number of rows, plus the rows that a tile may read beyond them."""
        most = self.max_tokens if rows == "tokens" else self.max_outputs
        most = -(-most * times // _TILE_ROWS) * _TILE_ROWS
        return most if times == 1 else most + _TILE_ROWS  # tiles of experts may start at any row


@operands
class HostCall(Op):
    """A call of a Python function between native ops.

    `function`: its number in the graph. `x_f32`: x is float32 beside rows of another type.
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
        dtype: Of the model's rows.
        ops: Their buffers are virtual (>= 0) or constants (~index).
        sizes: Bytes of each virtual buffer; 0: the caller binds it.
        inputs: Virtual buffers that the caller fills before a run.
        pinned: Virtual buffers that are kept to the end.
        constants: Memory that is the same in every step; None: of a weight that is not packed yet.
        weights: By constant, matrices and stacks of them that are to be packed.
        tables: By constant, matrices that are to be kept as float32 rows.
        copies: What the constants keep of the model's weights.
        functions: What `HostCall` ops call.
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
        """A new virtual buffer."""
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def constant(self, data: Bytes | None) -> int:
        """A reference to memory that is the same in every step."""
        self.constants.append(data)
        return ~(len(self.constants) - 1)

    def with_ops(self, ops: Iterable[Op]) -> Graph:
        """A copy with other ops; buffers and constants added to it are not shared."""
        return replace(
            self,
            ops=list(ops),
            sizes=[*self.sizes],
            constants=[*self.constants],
            copies=[*self.copies],
        )
