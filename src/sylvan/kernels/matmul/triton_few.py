"""Quantised matrices times a few rows on NVIDIA and AMD GPUs, for decoding.

Reading the codes takes most of the time, so all arithmetic must overlap with it. Codes minus zero
points are exact in the type of the rows, and the sum of each group is multiplied by its scale once.
If a step over inputs lies within one group, a tile of bytes gives two tiles of weights, for even
and for odd inputs, which are multiplied by the even and the odd columns of the rows, so that
nothing must be interleaved. Smaller groups are computed side by side, one product each. With
split-K several programs share the inputs of an output; a second kernel adds their sums, in order.

Shapes: T rows, K inputs, N outputs, G groups of inputs, S splits of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch
from sylvan.kernels.gpu.tiles import Tile, ceil_div
from sylvan.kernels.matmul.codes import bits_of
from sylvan.kernels.matmul.triton_codes import arguments, values_of
from sylvan.kernels.matmul.triton_nibbles import TYPES, assembly, halves
from sylvan.kernels.matmul.weights import CodedWeight

FEW = 16  # rows of a matrix instruction
HALVES = tuple(TYPES)
_STEPS = 4  # minimum steps over inputs per program; with fewer, the second kernel costs more
_SUM_BLOCK = 256


@triton.jit
def _by_input(x, inputs: tl.constexpr, each: tl.constexpr):
    """Repeat values of groups (S, N) for each of their inputs or pairs: (S each, N)."""
    cols: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], [inputs // each, each, cols]), [inputs, cols])


@triton.jit
def few_sums(
    x_at,
    real,
    q_at,
    wanted,
    group_row,
    first,
    last,
    width,
    groups,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    WHOLE: tl.constexpr,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Products of rows and columns of codes over the inputs from `first` to `last`: (ROWS, COLS).

    With FOUR, x has pairs of numbers as int32, and `width` counts bytes. `group_row`: where the
    scales of a column begin. PARTS: groups of a step of INNER inputs.
    """
    EACH: tl.constexpr = FOUR + 1
    PLACES: tl.constexpr = INNER // EACH
    k = tl.arange(0, PLACES)
    part_of = tl.arange(0, PARTS)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(first, last, INNER):
        byte_at = start // EACH
        x_mask, w_mask = real[:, None], wanted[None, :]
        if not WHOLE:
            inside = byte_at + k < width
            x_mask, w_mask = x_mask & inside[None, :], w_mask & inside[:, None]
        x = tl.load(x_at + byte_at, mask=x_mask, other=0)
        q = tl.load(q_at + byte_at, mask=w_mask, other=0)
        group = part_of + (start // GROUP if GROUP > 0 else 0)
        group_at = group_row[None, :] + group[:, None]
        group_mask = wanted[None, :] & (group < groups)[:, None]
        scale = tl.load(scale_ptr + group_at, mask=group_mask, other=0.0).to(tl.float32)
        zero = 0.0
        if ZEROS:
            zero = tl.load(zero_ptr + group_at, mask=group_mask, other=0).to(tl.float32)
            zero = _by_input(zero, PLACES, PLACES // PARTS)
        if FOUR:
            even = (x & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
            odd = (x >> 16).to(tl.int16).to(DTYPE, bitcast=True)
            low, high = halves(q, zero, table_ptr, CODE, ZEROS, DTYPE, PTX)
            if PARTS == 1:
                part = tl.dot(even, low)
                part = tl.dot(odd, high, part)
                acc += part * scale
            else:
                x = tl.reshape(tl.join(even, odd), [ROWS, INNER])
                both = tl.permute(tl.join(low, high), (0, 2, 1))
                w = tl.reshape(both, [PARTS, INNER // PARTS, COLS])
        else:
            w = values_of(q.to(tl.int32), table_ptr, CODE)
            if ZEROS:
                w += (128.0 if CODE == "int8" else 0.0) - zero
            w = w.to(DTYPE)
            if PARTS == 1:
                acc += tl.dot(x, w) * scale
            else:
                w = tl.reshape(w, [PARTS, INNER // PARTS, COLS])
        if PARTS > 1:
            apart = tl.permute(tl.reshape(x, [ROWS, PARTS, INNER // PARTS]), (1, 0, 2))
            acc += tl.sum(tl.dot(apart, w) * scale[:, None, :], 0)
        if SHIFTS:
            shift = tl.load(shift_ptr + group_at, mask=group_mask, other=0.0)
            if PARTS > 1:
                total = tl.sum(apart.to(tl.float32), 2)
                acc += tl.sum(total[:, :, None] * shift[:, None, :], 0)
            else:
                if FOUR:
                    total = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)
                else:
                    total = tl.sum(x.to(tl.float32), 1)
                acc += total[:, None] * shift
    return acc


@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    groups,
    x_stride,
    share,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of outputs over the inputs of one split."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    piece = tl.program_id(1)
    first = piece * share
    row = tl.arange(0, ROWS)
    k = tl.arange(0, INNER // (FOUR + 1))
    real, wanted = row < rows, col < outputs
    width = inputs // (FOUR + 1)
    acc = few_sums(
        x_ptr + row[:, None] * x_stride + k[None, :],
        real,
        q_ptr + col.to(tl.int64)[None, :] * width + k[:, None],
        wanted,
        col * groups,
        first,
        tl.minimum(first + share, inputs),
        width,
        groups,
        scale_ptr,
        zero_ptr,
        shift_ptr,
        table_ptr,
        WHOLE,
        CODE,
        FOUR,
        GROUP,
        ZEROS,
        SHIFTS,
        DTYPE,
        PTX,
        PARTS,
        ROWS,
        COLS,
        INNER,
    )
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + (piece * rows + row).to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@triton.jit
def _add_kernel(
    part_ptr,
    bias_ptr,
    y_ptr,
    count,
    outputs,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all splits (S, T N) in order, plus a bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(SHARES):
        total += tl.load(part_ptr + piece * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def few_rows(
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sizes: Tile,
    *,
    ptx: bool,
) -> None:
    """Fill Y (T, N) with X (T, K), at most `FEW` rows of float16 or bfloat16, by a matrix."""
    (outputs, inputs), dtype = weight.shape, x.dtype
    if bits_of(weight.code) == 4:
        x = as_pairs(x)
    share = _share(outputs, inputs, sizes)
    shares = ceil_div(inputs, share)
    out = y if shares == 1 else y.new_empty(shares, *y.shape, dtype=torch.float32)
    given, constants = arguments(x, weight, bias if shares == 1 else None, out, sizes)
    launch(
        few_kernel,
        (ceil_div(outputs, sizes.cols), shares),
        *given,
        share,
        **few_constants(weight, dtype, sizes.inner, ptx=ptx),
        **constants,
    )
    if shares > 1:
        launch(
            _add_kernel,
            (ceil_div(y.numel(), _SUM_BLOCK),),
            out,
            out if bias is None else bias,
            y,
            y.numel(),
            outputs,
            BIAS=bias is not None,
            SHARES=shares,
            BLOCK=_SUM_BLOCK,
        )


def few_constants(
    weight: CodedWeight, dtype: torch.dtype, inner: int, *, ptx: bool
) -> dict[str, Any]:
    """Constants of `few_sums` for rows of `dtype` in steps of `inner` inputs; `ptx`: on NVIDIA."""
    looks_up = ptx and bits_of(weight.code) == 4
    return {
        "DTYPE": TYPES[dtype],
        "PTX": assembly(weight.code, dtype) if looks_up else "",
        "PARTS": max(1, inner // weight.group) if weight.group else 1,
    }


def as_pairs(x: torch.Tensor) -> torch.Tensor:
    """Rows of 16-bit numbers as pairs: int32, half as many columns."""
    if x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    return x.view(torch.int32)


def _share(outputs: int, inputs: int, sizes: Tile) -> int:
    """Inputs per program: enough programs to fill the chip, but at least `_STEPS` steps each."""
    steps = ceil_div(inputs, sizes.inner)
    shares = max(1, min(steps // _STEPS, sizes.programs // ceil_div(outputs, sizes.cols)))
    return ceil_div(steps, shares) * sizes.inner
