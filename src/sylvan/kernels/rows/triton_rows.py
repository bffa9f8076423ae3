"""Row ops on GPUs: gathering, and arithmetic that would take several passes in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.gating.triton_gating import tanh
from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div
from sylvan.kernels.gpu.triton_early import inputs_ready

_BLOCK = 1024


@triton.jit
def _gather_kernel(
    x_ptr,
    rows_ptr,
    y_ptr,
    width,
    x_stride,
    factor,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    source = tl.load(rows_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + source * x_stride + col, mask=inside, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * factor
    tl.store(y_ptr + row * width + col, x.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _arithmetic_kernel(
    a_ptr,
    b_ptr,
    y_ptr,
    total,
    factor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    inputs_ready(EARLY)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    a = tl.load(a_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == "add":
        y = a + tl.load(b_ptr + i, mask=inside, other=0.0).to(tl.float32) * factor
    elif KIND == "scale":
        y = a * factor
    else:
        tl.static_assert(KIND == "softcap")
        y = tanh(a / factor) * factor
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=inside)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return gather(x, rows, 1.0, x.dtype)


def gather(x: torch.Tensor, rows: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows of x (M, D) times `factor`. Shape: (len(rows), D) of `dtype`."""
    assert x.stride(1) == 1
    out = torch.empty((len(rows), x.shape[1]), dtype=dtype, device=x.device)
    launch_early(
        _gather_kernel,
        (len(rows), ceil_div(x.shape[1], _BLOCK)),
        x,
        rows,
        out,
        x.shape[1],
        x.stride(0),
        factor,
        SCALED=factor != 1.0,
        BLOCK=_BLOCK,
    )
    return out


def add(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return _arithmetic(a, b, scale, "add")


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return _arithmetic(x, x, factor, "scale")


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return _arithmetic(x, x, cap, "softcap")


def _arithmetic(a: torch.Tensor, b: torch.Tensor, factor: float, kind: str) -> torch.Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    grid = (ceil_div(a.numel(), _BLOCK),)
    launch_early(_arithmetic_kernel, grid, a, b, out, a.numel(), factor, KIND=kind, BLOCK=_BLOCK)
    return out
