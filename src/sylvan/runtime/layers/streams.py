"""Residual connections of several streams; see `sylvan.kernels.streams`.

Shapes: T rows, S streams, D hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, X
from sylvan.kernels.streams import StreamParts, StreamShape
from sylvan.runtime.layers.build import Build

__all__ = ["StreamMix", "StreamShape", "StreamSum"]


class StreamMix(nn.Module):
    """Combines streams into a layer's input, and adds its output to the mixed streams; float32."""

    fn: LinearWeight
    base: torch.Tensor
    scale: torch.Tensor

    def __init__(self, build: Build, dim: int, shape: StreamShape) -> None:
        super().__init__()
        exact, count = replace(build, dtype=torch.float32), shape.streams
        self._shape = shape
        self.fn = exact.empty((2 + count) * count, count * dim)
        self.base, self.scale = exact.empty((2 + count) * count), exact.empty(3)

    def collapse(self, streams: X) -> tuple[X, X]:
        """Return the layer's input (T, D), and how `expand` writes its output."""
        parts = StreamParts(self.fn, self.base, self.scale, self._shape)
        return ops.collapse_streams(streams, parts)

    def expand(self, streams: X, out_TD: X, mix: X) -> X:
        """The streams after the layer. Shape: (T, S D)."""
        return ops.expand_streams(streams, out_TD, mix)


class StreamSum(nn.Module):
    """Weighted sum of streams, after the last layer."""

    fn: LinearWeight
    base: torch.Tensor
    scale: torch.Tensor

    def __init__(self, build: Build, dim: int, shape: StreamShape) -> None:
        super().__init__()
        exact, count = replace(build, dtype=torch.float32), shape.streams
        self._shape = shape
        self.fn = exact.empty(count, count * dim)
        self.base, self.scale = exact.empty(count), exact.empty(1)

    def forward(self, streams: X) -> X:
        """Shape: (T, S D) -> (T, D)."""
        return ops.sum_streams(streams, StreamParts(self.fn, self.base, self.scale, self._shape))
