"""Quantised matrices on GPUs: dequantised in registers, multiplied by matrix units.

Values are those of `codes.py`: w = (value - zero) scale + shift, rounded once to the dtype of the
rows. Tiles of codes are read in storage order, so a product reads four or eight bits per weight.
Chips without FP8 work the same way: e4m3 and e2m1 are decoded as float16 with shifted exponents.

Shapes: T rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import Tile, ceil_div, tile
from sylvan.kernels.matmul.codes import bits_of, table_of
from sylvan.kernels.matmul.weights import CodedWeight

_PLAIN = ("int4", "uint4", "int8", "fp8_e4m3", "fp4_e2m1")
_EXPAND = (16, 128)  # outputs and bytes of codes per program
_GROUP_ROWS = tl.constexpr(8)  # row tiles that use a column of weights in turn, for L2 reuse


@triton.jit
def values_of(raw, table_ptr, CODE: tl.constexpr):
    """Decode codes to float32; integers are centred."""
    if CODE == "int4":
        value = raw.to(tl.float32) - 8.0
    elif CODE == "uint4":
        value = raw.to(tl.float32)
    elif CODE == "int8":
        value = raw.to(tl.float32) - 128.0
    elif CODE == "fp8_e4m3":
        bits = ((raw & 0x80) << 8) | ((raw & 0x7F) << 7)
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif CODE == "fp4_e2m1":
        bits = ((raw & 8) << 12) | ((raw & 7) << 9)
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        value = tl.load(table_ptr + raw)
    return value


@triton.jit
def coded_tile(
    q_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    feature,
    k,
    mask,
    inputs,
    groups,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
):
    """Weights of outputs `feature` (1, N) and inputs `k` (K, 1), float32 (K, N)."""
    if FOUR:
        byte = tl.load(q_ptr + feature * (inputs // 2) + k // 2, mask=mask, other=0)
        raw = (byte.to(tl.int32) >> (k % 2 * 4)) & 15
    else:
        raw = tl.load(q_ptr + feature * inputs + k, mask=mask, other=0).to(tl.int32)
    value = values_of(raw, table_ptr, CODE)
    at = feature * groups + (k // GROUP if GROUP > 0 else k * 0)
    if ZEROS:
        middle = 8.0 if CODE == "int4" else (128.0 if CODE == "int8" else 0.0)
        value += middle - tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)
    w = value * tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SHIFTS:
        w += tl.load(shift_ptr + at, mask=mask, other=0.0)
    return w


@triton.jit(do_not_specialize=["rows"])
def _coded_kernel(
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
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
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
    feature = col.to(tl.int64)[None, :]
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, inputs, INNER):
        x_mask, w_mask = real[:, None], wanted[None, :]
        if not WHOLE:
            x_mask = x_mask & (start + k < inputs)[None, :]
            w_mask = w_mask & (start + k < inputs)[:, None]
        x = tl.load(x_at + start, mask=x_mask, other=0.0)
        w = coded_tile(
            q_ptr,
            scale_ptr,
            zero_ptr,
            shift_ptr,
            table_ptr,
            feature,
            (start + k)[:, None],
            w_mask,
            inputs,
            groups,
            CODE,
            FOUR,
            GROUP,
            ZEROS,
            SHIFTS,
        )
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


def codes_of(weight: CodedWeight) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments of `coded_tile` for a matrix or stack: its tensors, and its constants."""
    weight = weight.for_devices()
    table = weight.q if weight.code in _PLAIN else table_of(weight.code, weight.q.device)
    zero, shift = weight.zero, weight.shift
    tensors = (
        weight.q,
        weight.scale,
        weight.q if zero is None else zero,
        weight.scale if shift is None else shift,
        table,
    )
    assert all(part.is_contiguous() for part in tensors)
    return tensors, {
        "CODE": weight.code,
        "FOUR": bits_of(weight.code) == 4,
        "GROUP": weight.group,
        "ZEROS": zero is not None,
        "SHIFTS": shift is not None,
    }


def arguments(
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sizes: Tile,
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Arguments of kernels for quantised products, and constants by name."""
    tensors, constants = codes_of(weight)
    outputs, inputs = weight.shape
    about = len(x), outputs, inputs, weight.scale.shape[-1], x.stride(0)
    given = x, *tensors, weight.q if bias is None else bias, y, *about
    whole = inputs % sizes.inner == 0
    return given, constants | {"BIAS": bias is not None, "WHOLE": whole} | sizes.options


@triton.jit
def _expand_kernel(
    q_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    out_ptr,
    outputs,
    inputs,
    groups,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Dequantised weights of a tile, in the dtype of the output."""
    feature = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    width = inputs // 2 if FOUR else inputs
    at = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    mask = (feature < outputs) & (at < width)
    q = tl.load(q_ptr + feature * width + at, mask=mask, other=0).to(tl.int32)
    k = at * 2 if FOUR else at
    group_at = feature * groups + (k // GROUP if GROUP > 0 else k * 0)
    scale = tl.load(scale_ptr + group_at, mask=mask, other=0.0).to(tl.float32)
    less = tl.zeros([ROWS, COLS], tl.float32)
    if ZEROS:
        middle = 8.0 if CODE == "int4" else (128.0 if CODE == "int8" else 0.0)
        less += tl.load(zero_ptr + group_at, mask=mask, other=0).to(tl.float32) - middle
    more = tl.zeros([ROWS, COLS], tl.float32)
    if SHIFTS:
        more += tl.load(shift_ptr + group_at, mask=mask, other=0.0)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if FOUR:
        low = ((values_of(q & 15, table_ptr, CODE) - less) * scale + more).to(kind)
        high = ((values_of(q >> 4, table_ptr, CODE) - less) * scale + more).to(kind)
        both = tl.reshape(tl.join(low, high), [ROWS, 2 * COLS])
        to = (tl.program_id(1) * 2 * COLS + tl.arange(0, 2 * COLS))[None, :]
        tl.store(out_ptr + feature * inputs + to, both, mask=(feature < outputs) & (to < inputs))
    else:
        w = ((values_of(q, table_ptr, CODE) - less) * scale + more).to(kind)
        tl.store(out_ptr + feature * inputs + at, w, mask=mask)


def expanded(weight: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise the matrix (N, K), inputs in the order of its codes, rounded once to `dtype`."""
    outputs, inputs = weight.shape
    tensors, constants = codes_of(weight)
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.q.device)
    launch(
        _expand_kernel,
        (ceil_div(outputs, _EXPAND[0]), ceil_div(weight.q.shape[1], _EXPAND[1])),
        *tensors,
        out,
        outputs,
        inputs,
        weight.scale.shape[-1],
        **constants,
        ROWS=_EXPAND[0],
        COLS=_EXPAND[1],
        num_warps=4,
    )
    return out


def tiled_linear(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """Fill Y (T, N) with X (T, K) by a matrix of codes, whose inputs X has in their order."""
    sizes = tile("coded", len(x), x.element_size(), arch_of(x))
    given, constants = arguments(x, weight, bias, y, sizes)
    programs = ceil_div(len(x), sizes.rows) * ceil_div(weight.shape[0], sizes.cols)
    launch(_coded_kernel, (programs,), *given, **constants)
