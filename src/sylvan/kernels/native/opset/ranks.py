"""Ops in which the ranks that hold a model together exchange rows: one thread of each does it.

Shapes: T rows of the op, C columns.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class RankMemory(Operands):
    """Memory that `size` ranks share, in which each has rooms of `room_bytes`.

    A rank that does not arrive within `timeout_s` is lost; see `sylvan_ranks_lost`.
    """

    memory: Annotated[int, updates("u8", "sylvan_ranks_bytes(size, room_bytes)")]
    rank: int
    size: int
    room_bytes: int
    timeout_s: float


@operands
class AllReduce(Op):
    """The sum of all ranks' rows over a fixed tree, in float32, plus a bias.

    `x_f32`, `out_f32` beside rows of another type.
    """

    ranks: RankMemory
    x: Annotated[int, reads("row", "T, C")]
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    x_f32: bool = False
    out_f32: bool = False


@operands
class AllGather(Op):
    """The columns of all ranks side by side.

    Of `cols` columns each rank has `share`, but for the last ones that have any; this one
    `own_cols`.
    """

    ranks: RankMemory
    x: Annotated[int, reads("f32", "T, own_cols")]
    out: Annotated[int, writes("f32", "T, C")]
    cols: int
    share: int
    own_cols: int
