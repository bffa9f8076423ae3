"""Manifold-constrained hyper-connections (DeepSeek V4): a residual of several streams.

Each row computes a matrix that mixes its streams; rows and columns of the matrix sum to 1.

Shapes: T rows, S streams, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from sylvan.runtime.layers.build import Build


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """Number of streams, rounds of matrix normalisation, and epsilons of matrices and norms."""

    streams: int
    rounds: int
    eps: float
    norm_eps: float


class StreamMix(nn.Module):
    """Combines streams into a layer's input, and adds its output to the mixed streams; float32."""

    def __init__(self, build: Build, dim: int, shape: StreamShape) -> None:
        super().__init__()
        exact, count = replace(build, dtype=torch.float32), shape.streams
        self._shape = shape
        self.fn = exact.empty((2 + count) * count, count * dim)
        self.base, self.scale = exact.empty((2 + count) * count), exact.empty(3)

    def collapse(
        self, streams_TSD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the layer's input (T, D), weights of its output (T, S), and matrices (T, S, S)."""
        count, eps = self._shape.streams, self._shape.eps
        weights = _weights(streams_TSD, self.fn, self._shape.norm_eps)
        sizes = [count, count, count * count]
        read, write, mix = (
            weight * scale + base
            for weight, scale, base in zip(
                weights.split(sizes, -1), self.scale, self.base.split(sizes), strict=True
            )
        )
        row_TD = ((read.sigmoid() + eps)[..., None] * streams_TSD).sum(1)
        mix_TSS = mix.unflatten(-1, (count, count)).softmax(-1) + eps
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        for _ in range(self._shape.rounds - 1):
            mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
            mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        return row_TD, 2 * write.sigmoid(), mix_TSS

    def expand(
        self,
        streams_TSD: torch.Tensor,
        out_TD: torch.Tensor,
        write_TS: torch.Tensor,
        mix_TSS: torch.Tensor,
    ) -> torch.Tensor:
        """Mix the streams and add the layer's output. Shape: (T, S, D)."""
        return write_TS[..., None] * out_TD.float()[:, None] + mix_TSS.mT @ streams_TSD


class StreamSum(nn.Module):
    """Weighted sum of streams, after the last layer."""

    def __init__(self, build: Build, dim: int, shape: StreamShape) -> None:
        super().__init__()
        exact, count = replace(build, dtype=torch.float32), shape.streams
        self._shape = shape
        self.fn = exact.empty(count, count * dim)
        self.base, self.scale = exact.empty(count), exact.empty(1)

    def forward(self, streams_TSD: torch.Tensor) -> torch.Tensor:
        """Shape: (T, S, D) -> (T, D)."""
        weights = _weights(streams_TSD, self.fn, self._shape.norm_eps)
        read_TS = (weights * self.scale + self.base).sigmoid() + self._shape.eps
        return (read_TS[..., None] * streams_TSD).sum(1)


def _weights(streams_TSD: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Multiply the normed streams by `fn`. Shape: (T, rows of fn)."""
    flat = streams_TSD.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return functional.linear(flat, fn)
