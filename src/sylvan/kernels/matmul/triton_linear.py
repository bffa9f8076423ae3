"""Linear layers on GPUs: cuBLAS, but for a single row, whose product only reads the weight.

A program of the kernel holds a few outputs and walks all inputs; enough programs are resident that
their loads hide one another. cuBLAS pads the row to a tile and splits the sum among programs that
another kernel adds up, which reads small weights at four fifths of this speed.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import ceil_div, tile
from sylvan.kernels.matmul import reference
from sylvan.kernels.matmul.triton_coded import coded_linear
from sylvan.kernels.matmul.weights import CodedWeight

_HALVES = (torch.bfloat16, torch.float16)


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    wanted = col < outputs
    k = tl.arange(0, INNER)
    at = weight_ptr + col.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([COLS, INNER], tl.float32)
    for start in range(0, inputs, INNER):
        if WHOLE:
            x = tl.load(x_ptr + start + k)
            w = tl.load(at + start)
        else:
            inside = start + k < inputs
            x = tl.load(x_ptr + start + k, mask=inside, other=0.0)
            w = tl.load(at + start, mask=wanted[:, None] & inside[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)
    tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=wanted)


def linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    """Weights that round rows to int8 use PyTorch's implementation."""
    if isinstance(weight, CodedWeight):
        return coded_linear(x, weight, bias, out_f32=out_f32)
    if isinstance(weight, torch.Tensor) and x.dtype == weight.dtype in _HALVES:
        return _dense(x, weight, bias, out_f32=out_f32)
    return reference.linear(x, weight, bias, out_f32=out_f32)


def _dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    if x.numel() == x.shape[-1] and weight.is_contiguous():
        return _row(x, weight, bias, out_f32=out_f32)
    if not out_f32:
        return F.linear(x, weight, bias)
    if torch.version.hip is not None or x.is_meta:  # CUDA alone has another type of results
        return reference.linear(x, weight, bias, out_f32=True)
    out = torch.mm(x, weight.T, out_dtype=torch.float32)
    return out if bias is None else out + bias.float()


def _row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    outputs, inputs = weight.shape
    sizes = tile("row", inputs, weight.element_size(), arch_of(x))
    y = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if out_f32 else x.dtype)
    launch(
        _row_kernel,
        (ceil_div(outputs, sizes.cols),),
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        y,
        outputs,
        inputs,
        BIAS=bias is not None,
        WHOLE=inputs % sizes.inner == 0 and outputs % sizes.cols == 0,
        COLS=sizes.cols,
        INNER=sizes.inner,
        num_warps=sizes.warps,
    )
    return y
