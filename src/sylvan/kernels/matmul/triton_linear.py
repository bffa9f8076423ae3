"""Dense linear layers on GPUs: a GEMV kernel for a single row, cuBLAS for more.

A program of the kernel holds a few outputs and loops over all inputs; enough programs are resident
to hide latency. cuBLAS pads the row to a tile and uses split-K with a second kernel, which reads
small weights at four fifths of this speed.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from sylvan.kernels.api import ActivationKind, LinearWeight
from sylvan.kernels.gating.triton_gating import gated, glu
from sylvan.kernels.gpu.launch import arch_of, launch_early
from sylvan.kernels.gpu.tiles import ceil_div, tile
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.matmul import reference
from sylvan.kernels.matmul.triton_coded import coded_linear
from sylvan.kernels.matmul.weights import CodedWeight

_HALVES = (torch.bfloat16, torch.float16)


@triton.jit
def row_weights(at, start, k, wanted, inputs, WHOLE: tl.constexpr):
    """Columns start .. start + INNER - 1 of the matrix rows at `at`; float32."""
    if WHOLE:
        w = tl.load(at + start)
    else:
        inside = start + k < inputs
        w = tl.load(at + start, mask=wanted[:, None] & inside[None, :], other=0.0)
    return w.to(tl.float32)


@triton.jit
def row_inputs(x_ptr, start, k, inputs, WHOLE: tl.constexpr):
    """INNER numbers of the row; float32 (1, INNER)."""
    if WHOLE:
        x = tl.load(x_ptr + start + k)
    else:
        x = tl.load(x_ptr + start + k, mask=start + k < inputs, other=0.0)
    return x.to(tl.float32)[None, :]


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
    GATE: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """COLS outputs; with a GATE, weight row c is the gate of row outputs + c.

    The first weights are prefetched before the input row is complete.
    """
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    wanted = col < outputs
    k = tl.arange(0, INNER)
    at = weight_ptr + col.to(tl.int64)[:, None] * inputs + k[None, :]
    w = row_weights(at, 0, k, wanted, inputs, WHOLE)
    if GATE != "":
        up_at = weight_ptr + (outputs + col).to(tl.int64)[:, None] * inputs + k[None, :]
        up_w = row_weights(up_at, 0, k, wanted, inputs, WHOLE)
    inputs_ready(EARLY)
    x = row_inputs(x_ptr, 0, k, inputs, WHOLE)
    acc = w * x
    if GATE != "":
        up_acc = up_w * x
    for start in range(INNER, inputs, INNER):
        more = row_inputs(x_ptr, start, k, inputs, WHOLE)
        acc += row_weights(at, start, k, wanted, inputs, WHOLE) * more
        if GATE != "":
            up_acc += row_weights(up_at, start, k, wanted, inputs, WHOLE) * more
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)
    if GATE != "":
        up = tl.sum(up_acc, 1)
        if BIAS:
            up += tl.load(bias_ptr + outputs + col, mask=wanted, other=0.0).to(tl.float32)
        # round as if they had been stored in between
        gate = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = gated(gate, up, 1.0, 0.0, GATE, "")
    tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=wanted)


def linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    """Multiply by a weight; weights that quantise rows to int8 use PyTorch's implementation."""
    if isinstance(weight, CodedWeight):
        return coded_linear(x, weight, bias, out_f32=out_f32)
    if isinstance(weight, torch.Tensor) and x.dtype == weight.dtype in _HALVES:
        return _dense(x, weight, bias, out_f32=out_f32)
    return reference.linear(x, weight, bias, out_f32=out_f32)


def _dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    if _is_row(x, weight):
        return _row(x, weight, bias, out_f32=out_f32)
    if not out_f32:
        return F.linear(x, weight, bias)
    if torch.version.hip is not None or x.is_meta:  # only CUDA has a dtype argument for results
        return reference.linear(x, weight, bias, out_f32=True)
    out = torch.mm(x, weight.T, out_dtype=torch.float32)
    return out if bias is None else out + bias.float()


def gated_linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, kind: ActivationKind
) -> torch.Tensor:
    """A single row takes one launch, with the same bits as two."""
    if isinstance(weight, torch.Tensor) and _is_row(x, weight):
        return _row(x, weight, bias, out_f32=False, gate=kind)
    return glu(linear(x, weight, bias, out_f32=False), kind)


def _is_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product is bound by reading the weight."""
    same = x.dtype == weight.dtype in _HALVES
    return same and x.numel() == x.shape[-1] and weight.is_contiguous()


def _row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out_f32: bool,
    gate: ActivationKind | None = None,
) -> torch.Tensor:
    rows, inputs = weight.shape
    outputs = rows if gate is None else rows // 2
    op = "row" if gate is None else "gated row"
    sizes = tile(op, inputs, weight.element_size(), arch_of(x))
    y = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if out_f32 else x.dtype)
    launch_early(
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
        GATE=gate or "",
        COLS=sizes.cols,
        INNER=sizes.inner,
        num_warps=sizes.warps,
    )
    return y
