"""Residual streams: each row has several, which layers read and write by weights of the row.

Source: manifold-constrained hyper-connections (arXiv:2512.24880), as DeepSeek V4 has them. The
streams of a row lie side by side, in float32.

Shapes: T rows, S streams, D hidden.
"""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch

from sylvan.kernels.api import TracedTensor, Unsupported, X
from sylvan.kernels.streams import reference
from sylvan.kernels.streams.parts import StreamParts, StreamShape

__all__ = [
    "StreamParts",
    "StreamShape",
    "StreamTracer",
    "collapse_streams",
    "expand_streams",
    "spread_streams",
    "sum_streams",
]


@runtime_checkable
class StreamTracer(Protocol):
    """Emits these ops; arguments as in the functions below.

    Raises:
        Unsupported: from any method, when the shapes have no kernel.
    """

    def spread_streams(self, x: TracedTensor, count: int) -> TracedTensor: ...

    def collapse_streams(
        self, streams: TracedTensor, parts: StreamParts, *, mixes: bool
    ) -> tuple[TracedTensor, TracedTensor | None]:
        """Also return how to expand them, if the layer `mixes` them."""
        ...

    def expand_streams(
        self, streams: TracedTensor, out: TracedTensor, mix: TracedTensor
    ) -> TracedTensor: ...


def spread_streams(x: X, count: int) -> X:
    """Copy each row to all streams. Shape: (T, D) to float32 (T, S D)."""
    if isinstance(x, TracedTensor):
        return _tracer(x).spread_streams(x, count)
    return reference.spread(x, count)


def collapse_streams(streams: X, parts: StreamParts) -> tuple[X, X]:
    """Read the streams as one row, and return how `expand_streams` writes them.

    Returns: float32 (T, D), and float32 (T, S + S S): weights of writing, then matrices whose rows
        and columns sum to 1.
    """
    if isinstance(streams, TracedTensor):
        row, mix = _tracer(streams).collapse_streams(streams, parts, mixes=True)
        assert mix is not None
        return row, mix
    return reference.collapse(cast("torch.Tensor", streams), parts)


def expand_streams(streams: X, out: X, mix: X) -> X:
    """Mix the streams and add the output of a layer (T, D) to each. Shape: float32 (T, S D)."""
    if isinstance(streams, TracedTensor):
        assert isinstance(out, TracedTensor)
        assert isinstance(mix, TracedTensor)
        return _tracer(streams).expand_streams(streams, out, mix)
    assert isinstance(out, torch.Tensor)
    assert isinstance(mix, torch.Tensor)
    return reference.expand(streams, out, mix)


def sum_streams(streams: X, parts: StreamParts) -> X:
    """Weighted sum of the streams, after the last layer. Shape: (T, S D) to float32 (T, D)."""
    if isinstance(streams, TracedTensor):
        return _tracer(streams).collapse_streams(streams, parts, mixes=False)[0]
    return reference.total(streams, parts)


def _tracer(x: TracedTensor) -> StreamTracer:
    if not isinstance(x.tracer, StreamTracer):
        raise Unsupported("residual streams")
    return x.tracer
