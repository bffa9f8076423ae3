"""Normalisation with a preceding residual addition."""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import HeadNorm, X
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Split


def _weight(build: Build, dim: int | Split, learnt: bool) -> torch.Tensor:
    """A parameter, or constant ones that no checkpoint stores."""
    if learnt:
        return build.empty(dim)
    size = dim.size if isinstance(dim, Split) else dim
    return torch.ones(size, dtype=build.dtype, device=build.device)


class RMSNorm(nn.Module):
    """Root-mean-square norm; `offset` is added to the weight (Gemma: 1).

    If ranks share rows (`dim` is split), the mean covers all of them.
    """

    def __init__(
        self,
        build: Build,
        dim: int | Split,
        eps: float,
        offset: float = 0.0,
        *,
        weight: bool = True,
    ) -> None:
        super().__init__()
        self.weight = _weight(build, dim, weight)
        self._over = build.mesh.over(dim) if isinstance(dim, Split) else None
        self.eps = eps
        self.offset = offset

    def forward(self, x: X, residual: X | None = None) -> tuple[X, X]:
        """Return (norm(residual + x), residual + x); see `ops.rms_norm`. Shape: (T, D)."""
        given = x, self.weight, self.eps, residual
        return ops.rms_norm(*given, weight_offset=self.offset, over=self._over)

    def of_heads(self) -> HeadNorm:
        """The norm in the form in which attention applies it to each head."""
        return HeadNorm(self.weight, self.eps, self.offset, self._over)


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
