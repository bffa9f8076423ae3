"""Quantised experts of a few rows each, for decoding: a tile multiplies as `few_sums` does.

Codes less their zero points are multiplied as they are, and the sum of a group by its scale, so an
expert's matrix is read once, in its few bits. See `matmul.triton_few`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.experts.triton_pairs import (
    ExpertGate,
    PairRows,
    feature_of,
    pair_arguments,
    pairs_of_tile,
    store_pairs,
)
from sylvan.kernels.gpu.launch import arch_of, launch_early
from sylvan.kernels.gpu.tiles import ceil_div, tile
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.matmul.codes import bits_of
from sylvan.kernels.matmul.triton_codes import codes_of
from sylvan.kernels.matmul.triton_few import FEW, as_pairs, few_constants, few_sums
from sylvan.kernels.matmul.weights import CodedWeight


@triton.jit(do_not_specialize=["row_tiles"])
def few_pairs_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    bias_ptr,
    y_ptr,
    pair_ptr,
    owner_ptr,
    row_tiles,
    outputs,
    inputs,
    groups,
    x_stride,
    alpha,
    limit,
    PAIRS_OF_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CLAMP: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    """A tile of rows of pairs times the codes of the tile's expert, transposed."""
    inputs_ready(EARLY)
    expert, pair, real, col_tile = pairs_of_tile(
        pair_ptr, owner_ptr, row_tiles, outputs, ROWS, COLS
    )
    if expert >= 0:
        col = col_tile * COLS + tl.arange(0, COLS)
        feature = feature_of(col, outputs, GATE)
        first = expert.to(tl.int64) * outputs
        width = inputs // (FOUR + 1)
        k = tl.arange(0, INNER // (FOUR + 1))
        acc = few_sums(
            x_ptr + (pair // PAIRS_OF_ROW)[:, None] * x_stride + k[None, :],
            real,
            q_ptr + first * width + feature[None, :] * width + k[:, None],
            col < outputs,
            feature * groups,
            0,
            inputs,
            width,
            groups,
            scale_ptr + first * groups,
            zero_ptr + first * groups,
            shift_ptr + first * groups,
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
        store_pairs(
            acc,
            bias_ptr,
            y_ptr,
            expert,
            pair,
            real,
            col_tile,
            outputs,
            alpha,
            limit,
            BIAS,
            GATE,
            CLAMP,
            ROWS,
            COLS,
        )


def few_pairs(
    rows: PairRows, stack: CodedWeight, bias: torch.Tensor | None, gate: ExpertGate | None
) -> torch.Tensor:
    """Rows of float16 or bfloat16, in tiles of `FEW`, by a stack of codes in their order."""
    _, outputs, inputs = stack.shape
    rows = rows.apart()  # scaling in the kernel takes registers that it has not
    x, four, arch = rows.x, bits_of(stack.code) == 4, arch_of(rows.x)
    shifts = stack.shift is not None
    op = "few experts, shifts" if shifts else "few experts" if four else "few experts, bytes"
    sizes = tile(op, FEW, x.element_size(), arch)
    y = rows.outputs(outputs, gate)
    tensors, constants = codes_of(stack)
    given = as_pairs(x) if four else x
    launch_early(
        few_pairs_kernel,
        (rows.places.row_tiles * ceil_div(outputs, sizes.cols),),
        given,
        *tensors,
        stack.q if bias is None else bias,
        y,
        outputs=outputs,
        inputs=inputs,
        groups=stack.scale.shape[-1],
        x_stride=given.stride(0),
        **pair_arguments(rows, bias, gate),
        WHOLE=inputs % sizes.inner == 0,
        **constants,
        **few_constants(stack, x.dtype, sizes.inner, ptx=arch.startswith("sm")),
        **(sizes.options | {"ROWS": rows.places.rows}),
    )
    return y
