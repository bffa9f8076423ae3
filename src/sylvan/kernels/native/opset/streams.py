"""Ops of residual streams; see `sylvan.kernels.streams`. A row has all its streams side by side.

Shapes: T rows, C columns of a stream, S streams.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, operands, reads, writes


@operands
class StreamSpread(Op):
    """Copies each row to all streams."""

    x: Annotated[int, reads("f32", "T, C")]
    out: Annotated[int, writes("f32", "T, num_streams, C")]
    cols: int
    num_streams: int


@operands
class StreamWeights(Op):
    """Products of all streams of a row with a matrix, whose rows are `weight_stride` apart."""

    x: Annotated[int, reads("f32", "T, C")]
    weight: Annotated[int, reads("f32", "outputs, weight_stride")]
    out: Annotated[int, writes("f32", "T, outputs")]
    cols: int
    outputs: int
    weight_stride: int


@operands
class StreamCollapse(Op):
    """Sum of the streams, by weights for the normed streams.

    With `mix`, weights are also of writing and mixing: `mix` gets those of writing, then a matrix
    whose rows and columns are normalised in `rounds`.
    """

    x: Annotated[int, reads("f32", "T, num_streams, C")]
    weights: Annotated[int, reads("f32", "T, outputs")]
    base: Annotated[int, reads("f32", "outputs")]
    scale: Annotated[int, reads("f32", "one for each use of the weights")]
    out: Annotated[int, writes("f32", "T, C")]
    mix: Annotated[BufferRef, writes("f32", "T, S + S S")] = None
    cols: int
    num_streams: int
    outputs: int
    rounds: int
    eps: float
    norm_eps: float


@operands
class StreamExpand(Op):
    """Mixes the streams, and adds the output of a layer to each."""

    streams: Annotated[int, reads("f32", "T, num_streams, C")]
    x: Annotated[int, reads("row", "T, C")]
    mix: Annotated[int, reads("f32", "T, S + S S")]
    out: Annotated[int, writes("f32", "T, num_streams, C")]
    cols: int
    num_streams: int
