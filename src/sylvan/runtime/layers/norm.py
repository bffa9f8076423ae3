"""Normalisation with the residual addition in front of it."""

from __future__ import annotations

from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import HeadNorm, X
from sylvan.runtime.layers.build import Build


class RMSNorm(nn.Module):
    """Root-mean-square norm; `offset` is added to the weight (Gemma: 1)."""

    def __init__(self, build: Build, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = build.empty(dim)
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

    def __init__(self, build: Build, dim: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = build.empty(dim)
        self.bias = build.empty(dim) if bias else None
        self.eps = eps

    def forward(self, x: X, residual: X | None = None) -> tuple[X, X]:
        """Return (norm(residual + x), residual + x); see `ops.layer_norm`. Shape: (T, D)."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
