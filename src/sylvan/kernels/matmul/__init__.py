"""Linear layers: dense, int8 and group-wise int4 weights."""

from __future__ import annotations

import torch

from sylvan.kernels.api import ActivationKind, LinearWeight, TracedTensor, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.matmul import reference

_linear = KernelDispatch("matmul.linear", reference.linear)
_gated_linear = KernelDispatch("matmul.gated_linear", reference.gated_linear)


def linear(
    x: X,
    weight: LinearWeight,
    bias: torch.Tensor | None = None,
    *,
    out_f32: bool = False,
    parts: int = 1,
) -> X:
    """Multiply x (T, K) by weight (N, K) transposed, then add bias.

    Shape: (T, N), in the dtype of x, or float32 if `out_f32`.

    Sums are float32 (dense) or exact integers per scale group (quantised). With a quantised weight
    each row of x is quantised to int8 by itself: its largest magnitude becomes 127. With `parts` (a
    power of two, dense weights only) K is divided into equal parts, whose products are added as by
    `collective.tree_sum`.
    """
    if isinstance(x, TracedTensor):
        return x.tracer.linear(x, weight, bias, out_f32, parts)
    if parts > 1:
        return reference.linear_parts(x, weight, bias, out_f32=out_f32, parts=parts)
    return _linear.on(x)(x, weight, bias, out_f32=out_f32)


def gated_linear(x: X, weight: LinearWeight, bias: torch.Tensor | None, kind: ActivationKind) -> X:
    """`gating.glu` of `linear`: weight (2 F, K), gates first. Shape: (T, K) to (T, F)."""
    if isinstance(x, TracedTensor):
        return x.tracer.glu(x.tracer.linear(x, weight, bias, False), kind, None)
    return _gated_linear.on(x)(x, weight, bias, kind)
