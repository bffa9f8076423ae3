"""Norms on GPUs: one program per row, which stays in registers; memory is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import power_of_two, row_warps
from sylvan.kernels.gpu.triton_early import inputs_ready


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    h_ptr,
    total_ptr,
    width,
    x_stride,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_TOTAL: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32) + offset
    inputs_ready(EARLY)
    total = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * width + col, mask=inside, other=0.0).to(tl.float32)
    if KEEP_TOTAL:
        tl.store(total_ptr + row * width + col, total, mask=inside)
    y = total
    if CENTRED:
        # Columns beyond the row would add (0 - mean)^2 to the variance.
        y = tl.where(inside, total - tl.sum(total, 0) / width, 0.0)
    y = y * (1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / width + eps))
    if HAS_WEIGHT:
        y = y * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + row * width + col, y.to(h_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 `residual` is updated in place."""
    h = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    return h, _norm(x, residual, (weight, None), (eps, offset, False), h)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 `residual` is updated in place."""
    dtype = x.dtype if weight is None else weight.dtype
    h = torch.empty(x.shape, dtype=dtype, device=x.device)
    return h, _norm(x, residual, (weight, bias), (eps, 0.0, True), h)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    how: tuple[float, float, bool],
    h: torch.Tensor,
) -> torch.Tensor:
    """Write h, and return the float32 sum before the norm."""
    weight, bias = scales
    eps, offset, centred = how
    if x.stride(-1) != 1 or x.dim() != 2:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    if residual is None:
        total = x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    else:
        residual = residual.contiguous()
        total = residual if residual.dtype == torch.float32 else residual.float()
    width = x.shape[-1]
    block = power_of_two(width)
    launch_early(
        _norm_kernel,
        (x.numel() // width,),
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        h,
        total,
        width,
        x.stride(0),
        eps,
        offset,
        HAS_RESIDUAL=residual is not None,
        KEEP_TOTAL=total is not x,
        CENTRED=centred,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return total.view(h.shape)
