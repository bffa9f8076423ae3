"""Traces ops of residual streams; see `sylvan.kernels.streams`."""

from __future__ import annotations

from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.opset import StreamCollapse, StreamExpand, StreamSpread, StreamWeights
from sylvan.kernels.streams.parts import StreamParts

MAX_STREAMS = 8  # see MAX_STREAMS
_COLUMNS = 16  # of a stream: a multiple of this


def trace_spread(builder: ProgramBuilder, x: TracedTensor, count: int) -> TracedTensor:
    """Trace `spread_streams`."""
    if x.dtype != "f32" or x.cols % _COLUMNS or count > MAX_STREAMS:
        raise Unsupported(f"{count} residual streams of {x.cols} {x.dtype} columns")
    out = builder.new(count * x.cols, "f32", x)
    op = StreamSpread(x=x.id, out=out.id, cols=x.cols, num_streams=count)
    builder.emit(op, out, dtype=builder.dtype)
    return out


def trace_collapse(
    builder: ProgramBuilder, streams: TracedTensor, parts: StreamParts, *, mixes: bool
) -> tuple[TracedTensor, TracedTensor | None]:
    """Trace `collapse_streams`, or `sum_streams` unless the layer `mixes` them."""
    count, outputs = parts.shape.streams, parts.fn.shape[0]
    assert outputs == (count * (2 + count) if mixes else count)
    weights = builder.new(outputs, "f32", streams)
    product = StreamWeights(
        x=streams.id,
        weight=builder.table(parts.fn),
        out=weights.id,
        cols=streams.cols,
        outputs=outputs,
        weight_stride=padded(streams.cols),
    )
    builder.emit(product, streams, dtype=builder.dtype)
    out = builder.new(streams.cols // count, "f32", streams)
    mix = builder.new(count * (1 + count), "f32", streams) if mixes else None
    op = StreamCollapse(
        x=streams.id,
        weights=weights.id,
        base=builder.vector(parts.base),
        scale=builder.vector(parts.scale),
        out=out.id,
        mix=None if mix is None else mix.id,
        cols=out.cols,
        num_streams=count,
        outputs=outputs,
        rounds=parts.shape.rounds,
        eps=parts.shape.eps,
        norm_eps=parts.shape.norm_eps,
    )
    builder.emit(op, out, dtype=builder.dtype)
    return out, mix


def trace_expand(
    builder: ProgramBuilder, streams: TracedTensor, x: TracedTensor, mix: TracedTensor
) -> TracedTensor:
    """Trace `expand_streams`."""
    builder.expect(x, "residual streams")
    out = builder.new(streams.cols, "f32", streams)
    count = streams.cols // x.cols
    op = StreamExpand(
        streams=streams.id, x=x.id, mix=mix.id, out=out.id, cols=x.cols, num_streams=count
    )
    builder.emit(op, out, dtype=builder.dtype)
    return out
