"""FP8 GEMM on GPUs with FP8 units: prompts times matrices of e4m3 codes.

Rows are rounded to e4m3 with a scale per row, or per row and 128 inputs if the matrix has groups of
128, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Sums of 128 products are added in float32.
With row scales PyTorch's own kernel computes. Batches that are too small for FP8 units are rounded
in the same way, so a row's rounding does not depend on the other rows.

Shapes: T rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import ceil_div, tile
from sylvan.kernels.matmul.weights import CodedWeight

_scaled_mm: Any = vars(torch)["_scaled_mm"]
E4M3 = torch.float8_e4m3fn
_GROUP_ROWS = tl.constexpr(8)
_MAX = tl.constexpr(448.0)
_MIN = tl.constexpr(1e-12)
_SMALLEST = tl.constexpr((127 - 6) << 23)  # exponent of the smallest normal number, as float32
_BITS = tl.constexpr(20 << 23)  # adding 2^20 x rounds to a last bit of x / 8


@triton.jit
def _nearest(x):
    """The nearest e4m3 numbers, as float32; adding a large number rounds to four bits."""
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, _SMALLEST)
    large = (power + _BITS).to(tl.float32, bitcast=True) * 1.5
    return (x + large) - large


@triton.jit
def _round_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    inputs,
    groups,
    x_stride,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Round a group of a row, in STEPS blocks, to e4m3 and its scale, or BACK to its dtype."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    size = BLOCK * STEPS
    k = group * size + tl.arange(0, BLOCK)
    at = x_ptr + row * x_stride + k
    top = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        inside = k + step * BLOCK < inputs
        x = tl.load(at + step * BLOCK, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(x))
    scale = tl.div_rn(tl.maximum(tl.max(top, 0), _MIN), _MAX)
    for step in range(STEPS):
        inside = k + step * BLOCK < inputs
        x = tl.load(at + step * BLOCK, mask=inside, other=0.0).to(tl.float32)
        q = _nearest(tl.div_rn(x, scale + tl.zeros([BLOCK], tl.float32)))
        to = q_ptr + row * inputs + k + step * BLOCK
        if BACK:
            tl.store(to, (q * scale).to(q_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(to, q.to(tl.float8e4nv), mask=inside)
    if not BACK:
        tl.store(scale_ptr + row * groups + group, scale)


@triton.jit
def fp8_sums(
    x_at,
    w_at,
    x_scale_at,
    w_scale_at,
    real,
    wanted,
    inputs,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Products of e4m3 rows and columns, times their scales; float32 (ROWS, COLS)."""
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(inputs // INNER):
        x = tl.load(x_at + step * INNER, mask=real[:, None], other=0.0)
        w = tl.load(w_at + step * INNER, mask=wanted[None, :], other=0.0)
        if GROUPED:
            x_scale = tl.load(x_scale_at + step, mask=real, other=0.0)
            w_scale = tl.load(w_scale_at + step, mask=wanted, other=0.0).to(tl.float32)
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        else:
            acc += tl.dot(x, w)
    if not GROUPED:
        x_scale = tl.load(x_scale_at, mask=real, other=0.0)
        w_scale = tl.load(w_scale_at, mask=wanted, other=0.0).to(tl.float32)
        acc *= x_scale[:, None] * w_scale[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def _fp8_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    groups,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles = (rows + ROWS - 1) // ROWS
    col_tiles = (outputs + COLS - 1) // COLS
    in_group = _GROUP_ROWS * col_tiles
    first_tile = program // in_group * _GROUP_ROWS
    group_tiles = tl.minimum(row_tiles - first_tile, _GROUP_ROWS)
    row = (first_tile + program % in_group % group_tiles) * ROWS + tl.arange(0, ROWS)
    col = program % in_group // group_tiles * COLS + tl.arange(0, COLS)
    k = tl.arange(0, INNER)
    real, wanted = row < rows, col < outputs
    x_at = x_ptr + row.to(tl.int64)[:, None] * inputs + k[None, :]
    w_at = w_ptr + col.to(tl.int64)[None, :] * inputs + k[:, None]
    acc = fp8_sums(
        x_at,
        w_at,
        x_scale_ptr + row * groups,
        w_scale_ptr + col * groups,
        real,
        wanted,
        inputs,
        GROUPED,
        ROWS,
        COLS,
        INNER,
    )
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Round rows (T, K) to e4m3 and back, with row scales (`group` 0) or scales of 128 inputs."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _round(x, group, out, out, back=True)
    return out


def quantised_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows (T, K) to e4m3; return them and their scales, float32 (T, G)."""
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    groups = x.shape[1] // group if group else 1
    scale = torch.empty(len(x), groups, dtype=torch.float32, device=x.device)
    _round(x, group, q, scale, back=False)
    return q, scale


def _round(
    x: torch.Tensor, group: int, out: torch.Tensor, scale: torch.Tensor, *, back: bool
) -> None:
    rows, inputs = x.shape
    block = group or 1024
    steps = 1 if group else ceil_div(inputs, block)
    launch(
        _round_kernel,
        (rows, inputs // group if group else 1),
        x,
        out,
        scale,
        inputs,
        scale.shape[1],
        x.stride(0),
        BACK=back,
        BLOCK=block,
        STEPS=steps,
        num_warps=1 if group else 4,
    )


def fp8_linear(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    """Round X (T, K), float16 or bfloat16, to e4m3 and multiply by a matrix that `takes_fp8`."""
    q, scale = quantised_rows(x, weight.group)
    if weight.group == 0 and x.dtype == torch.bfloat16 and not out_f32 and x.is_cuda:
        out = _scaled_mm(
            q,
            weight.q.view(E4M3).T,
            scale_a=scale,
            scale_b=weight.scale.float().T,
            out_dtype=x.dtype,
        )
        return out if bias is None else out + bias
    return fp8_product(q, scale, weight, bias, torch.float32 if out_f32 else x.dtype)


def fp8_product(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply e4m3 rows (T, K) with scales (T, G) by a matrix with G groups; `dtype` (T, N)."""
    outputs, inputs = weight.shape
    sizes = tile("fp8", len(q), q.element_size(), arch_of(q))
    y = torch.empty(len(q), outputs, dtype=dtype, device=q.device)
    launch(
        _fp8_kernel,
        (ceil_div(len(q), sizes.rows) * ceil_div(outputs, sizes.cols),),
        q,
        scale,
        weight.q.view(E4M3),
        weight.scale,
        scale if bias is None else bias,
        y,
        len(q),
        outputs,
        inputs,
        scale.shape[1],
        BIAS=bias is not None,
        GROUPED=weight.group != 0,
        **sizes.options,
    )
    return y
