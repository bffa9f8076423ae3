"""Normalisation of rows, fused with the residual addition in front of it."""

from __future__ import annotations

import torch

from sylvan.kernels.api import RowParts, TracedTensor, Unsupported, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.norm import reference

_rms_norm = KernelDispatch("norm.rms_norm", reference.rms_norm)
_layer_norm = KernelDispatch("norm.layer_norm", reference.layer_norm)


def rms_norm(
    x: X,
    weight: torch.Tensor,
    eps: float,
    residual: X | None = None,
    *,
    weight_offset: float = 0.0,
    over: RowParts | None = None,
) -> tuple[X, X]:
    """Return (h, residual): residual += x, then h = rms(residual) * (weight + weight_offset).

    Without `residual` it starts as x. The sum is float32; h has the dtype of `weight` and is
    rounded once. Do not use the old `residual` afterwards: it may be updated in place. With `over`
    each rank has its part of each row, and of `weight`.
    """
    if isinstance(x, TracedTensor):
        if over is not None:
            raise Unsupported("norms of rows that ranks share")
        return x.tracer.rms_norm(x, weight, eps, residual, weight_offset)
    assert residual is None or isinstance(residual, torch.Tensor)
    if over is not None:
        return reference.rms_norm(x, weight, eps, residual, weight_offset, over)
    return _rms_norm.on(x)(x, weight, eps, residual, weight_offset)


def layer_norm(
    x: X,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: X | None = None,
) -> tuple[X, X]:
    """Return (h, residual) as `rms_norm` does, but normalise by mean and variance.

    `weight` None means ones; then h has the model's dtype (that of x, or of the program).
    """
    if isinstance(x, TracedTensor):
        return x.tracer.layer_norm(x, weight, bias, eps, residual)
    assert residual is None or isinstance(residual, torch.Tensor)
    return _layer_norm.on(x)(x, weight, bias, eps, residual)
