"""Normalisation with the residual addition in front of it."""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import HeadNorm, X
from sylvan.runtime.layers.build import Build


def _weight(build: Build, dim: int, learnt: bool) -> torch.Tensor:
    """A parameter, or ones that no checkpoint has."""
    ones = torch.ones(dim, dtype=build.dtype, device=build.device)
    return build.empty(dim) if learnt else ones


class RMSNorm(nn.Module):
    """Root-mean-square norm; `offset` is added to the weight (Gemma: 1)."""

    def __init__(
        self, build: Build, dim: int, eps: float, offset: float = 0.0, *, weight: bool = True
    ) -> None:
        super().__init__()
        self.weight = _weight(build, dim, weight)
        self.eps = eps
        self.offset = offset

    def forward(self, x: X, residual: X | None = None) -> tuple[X, X]:
        """Return (norm(residual + x), residual + x); see `ops.rms_norm`. Shape: (T, D)."""
        return ops.rms_norm(x, self.weight, self.eps, residual, weight_offset=self.offset)

    def of_heads(self) -> HeadNorm:
        """The same norm as attention applies it to each head."""
        return HeadNorm(self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Norm with mean and variance removed."""

    def __init__(
        self, build: Build, dim: int, eps: float, *, bias: bool = True, weight: bool = True
    ) -> None:
        super().__init__()
        self.weight = _weight(build, dim, weight)
        self.bias = build.empty(dim) if bias and weight else None
        self.eps = eps

    def forward(self, x: X, residual: X | None = None) -> tuple[X, X]:
        """Return (norm(residual + x), residual + x); see `ops.layer_norm`. Shape: (T, D)."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
