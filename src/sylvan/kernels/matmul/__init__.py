"""Linear layers: dense, int8 and group-wise int4 weights."""

from __future__ import annotations

import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.matmul import reference

_linear = KernelDispatch(reference.linear, "sylvan.kernels.matmul.triton_linear")


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

    Sums are float32 (dense) or exact integers per scale group (quantised). A quantised weight
    quantises each row of x to int8 by itself: the largest magnitude becomes 127. A product over K
    in `parts` of equal length is the sum of theirs, as by `collective.tree_sum`: that of a power of
    two, of a dense weight.
    """
    if isinstance(x, TracedTensor):
        return x.tracer.linear(x, weight, bias, out_f32, parts)
    if parts > 1:
        return reference.linear_parts(x, weight, bias, out_f32=out_f32, parts=parts)
    return _linear.on(x)(x, weight, bias, out_f32=out_f32)
