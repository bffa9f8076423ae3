"""Feed-forward blocks."""

from __future__ import annotations

from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, Clamping, X
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix. Shape: (T, D) -> (T, D)."""

    def __init__(
        self, build: Build, dim: int, inner: int, act: ActivationKind, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallel(build, dim, (inner, inner), bias=bias)
        self.down_proj = RowParallel(build, inner, dim, bias=bias)
        self._act: ActivationKind = act

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.down_proj(self.gate_up_proj.gated(x_TD, self._act))


class ClampedMLP(GatedMLP):
    """A gated MLP that clamps gate and up projections; see `Clamping`.

    Args:
        build: Build options.
        sizes: D, and columns of a factor.
        act: Activation of the gate.
        clamping: The limits.
        bias: Whether the products have biases.
    """

    def __init__(
        self,
        build: Build,
        sizes: tuple[int, int],
        act: ActivationKind,
        clamping: Clamping,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(build, *sizes, act, bias=bias)
        self._clamping = clamping

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.down_proj(ops.glu(self.gate_up_proj(x_TD), self._act, self._clamping))


class MLP(nn.Module):
    """down(act(up(x))). Shape: (T, D) -> (T, D)."""

    def __init__(
        self, build: Build, dim: int, inner: int, act: ActivationKind, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallel(build, dim, (inner,), bias=bias)
        self.down_proj = RowParallel(build, inner, dim, bias=bias)
        self._act: ActivationKind = act

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.down_proj(ops.activation(self.up_proj(x_TD), self._act))
