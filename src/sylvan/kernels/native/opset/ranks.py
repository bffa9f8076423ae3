"""Collective ops between the ranks of a model; one thread of each rank runs them.

Shapes: T rows of the op, C columns.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class RankMemory(Operands):
    """Memory that `size` ranks share, in which each has buffers of `buffer_bytes`.

    A rank that does not arrive within `timeout_s` is lost; see `sylvan_ranks_lost`.
    """

    memory: Annotated[int, updates("u8", "sylvan_ranks_bytes(size, buffer_bytes)")]
    rank: int
    size: int
    buffer_bytes: int
    timeout_s: float


@operands
class AllReduce(Op):
    """Sums the rows of all ranks over a fixed tree, in float32, and adds a bias.

    `x_f32`, `out_f32`: these are float32 although rows have another type.
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
    """Concatenates the columns of all ranks.

    Each rank has `share` of `cols` columns, except the last ranks; this rank has `own_cols`.
    """

    ranks: RankMemory
    x: Annotated[int, reads("f32", "T, own_cols")]
    out: Annotated[int, writes("f32", "T, C")]
    cols: int
    share: int
    own_cols: int
