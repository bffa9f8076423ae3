"""Rows of pairs times the matrices of their experts: a grouped GEMM in one launch.

Plain matrices are multiplied as they are. Quantised ones are expanded in registers, tile by tile;
for few rows per expert, and for rows in 8-bit floats, there are kernels of their own.

Shapes: E experts, P pairs of a row and an expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ExpertWeights, LinearWeight
from sylvan.kernels.experts.triton_few_pairs import few_pairs
from sylvan.kernels.experts.triton_fp8_pairs import fp8_pairs
from sylvan.kernels.experts.triton_pairs import (
    ExpertGate,
    PairRows,
    feature_of,
    pair_arguments,
    pairs_of_tile,
    store_pairs,
)
from sylvan.kernels.gpu.launch import arch_of, launch_early
from sylvan.kernels.gpu.tiles import Tile, ceil_div, tile
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.matmul.triton_codes import coded_tile, codes_of
from sylvan.kernels.matmul.triton_few import FEW, HALVES
from sylvan.kernels.matmul.triton_fp8 import rounded
from sylvan.kernels.matmul.weights import CodedWeight

_DENSE = {"CODE": "", "FOUR": False, "GROUP": 0, "ZEROS": False, "SHIFTS": False}


@triton.jit(do_not_specialize=["row_tiles"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    share_ptr,
    y_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
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
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CLAMP: tl.constexpr,
    WHOLE: tl.constexpr,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of x (rows of pairs) times the weight of the tile's expert, transposed.

    Row `pair // PAIRS_OF_ROW` of x gives row `pair` of y. With a GATE the first half of the outputs
    are gates, the second half the gated values, and y is the product: a tile has both of a column
    side by side, in the registers of one thread. With a CODE weights are quantised codes.
    """
    inputs_ready(EARLY)
    expert, pair, real, col_tile = pairs_of_tile(
        pair_ptr, owner_ptr, row_tiles, outputs, ROWS, COLS
    )
    if expert >= 0:
        row = pair.to(tl.int64) // PAIRS_OF_ROW
        col = col_tile * COLS + tl.arange(0, COLS)
        feature = feature_of(col, outputs, GATE)
        wanted = col < outputs
        k = tl.arange(0, INNER)
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        w_at = weight_ptr + expert.to(tl.int64) * outputs * inputs
        w_at += feature.to(tl.int64)[None, :] * inputs + k[:, None]
        if SCALED:
            share = tl.load(share_ptr + pair, mask=real, other=0.0)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, inputs, INNER):
            x_mask, w_mask = real[:, None], wanted[None, :]
            if not WHOLE:
                x_mask = x_mask & (start + k < inputs)[None, :]
                w_mask = w_mask & (start + k < inputs)[:, None]
            x = tl.load(x_at + start, mask=x_mask, other=0.0)
            if SCALED:
                x = (x.to(tl.float32) * share[:, None]).to(x_ptr.dtype.element_ty)
            if CODE != "":
                w = coded_tile(
                    weight_ptr,
                    scale_ptr,
                    zero_ptr,
                    shift_ptr,
                    table_ptr,
                    expert.to(tl.int64) * outputs + feature.to(tl.int64)[None, :],
                    (start + k)[:, None],
                    w_mask,
                    inputs,
                    groups,
                    CODE,
                    FOUR,
                    GROUP,
                    ZEROS,
                    SHIFTS,
                ).to(x.dtype)
            else:
                w = tl.load(w_at + start, mask=w_mask, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
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


def tile_for(weights: ExpertWeights, average: int, x: torch.Tensor) -> Tile:
    """The tile of a layer's products, of `average` rows per expert."""
    op = "experts" if isinstance(weights.gate_up, torch.Tensor) else "coded experts"
    return tile(op, average, x.element_size(), arch_of(x))


def product(
    rows: PairRows,
    weight: tuple[LinearWeight, LinearWeight | None],
    sizes: Tile,
    gate: ExpertGate | None = None,
) -> torch.Tensor:
    """Multiply each pair's row by its expert's matrix, add the bias, and gate if asked.

    `rows.places` are in tiles of `sizes`. Returns: a row for each pair.
    """
    stack, bias = weight
    assert isinstance(stack, torch.Tensor | CodedWeight)
    assert bias is None or isinstance(bias, torch.Tensor)
    if isinstance(stack, torch.Tensor):
        return _tiled(rows, (stack, bias), sizes, gate)
    if stack.order is not None:
        rows = replace(rows, x=rows.x.index_select(-1, stack.order))
    if rows.x.dtype not in HALVES:
        return _tiled(rows, (stack, bias), sizes, gate)
    if stack.fp8_inputs:
        rows = rows.apart()
        if sizes.rows > FEW:
            return fp8_pairs(rows, stack, bias, gate)
        rows = replace(rows, x=rounded(rows.x, stack.group))
    if sizes.rows <= FEW:
        return few_pairs(rows, stack, bias, gate)
    return _tiled(rows, (stack, bias), sizes, gate)


def _codes(
    stack: torch.Tensor | CodedWeight,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int, dict[str, Any]]:
    """Kernel arguments of a stack of matrices, plain or quantised."""
    if isinstance(stack, torch.Tensor):
        return stack, (stack,) * 4, 0, _DENSE
    (matrix, *rest), constants = codes_of(stack)
    return matrix, tuple(rest), stack.scale.shape[-1], constants


def _tiled(
    rows: PairRows,
    weight: tuple[torch.Tensor | CodedWeight, torch.Tensor | None],
    sizes: Tile,
    gate: ExpertGate | None,
) -> torch.Tensor:
    stack, bias = weight
    _, outputs, inputs = stack.shape
    matrix, coded, groups, constants = _codes(stack)
    assert matrix.is_contiguous()
    y = rows.outputs(outputs, gate)
    launch_early(
        _product_kernel,
        (rows.places.row_tiles * ceil_div(outputs, sizes.cols),),
        rows.x,
        matrix,
        matrix if bias is None else bias,
        rows.x if rows.shares is None else rows.shares,
        y,
        *coded,
        outputs=outputs,
        inputs=inputs,
        groups=groups,
        x_stride=rows.x.stride(0),
        **pair_arguments(rows, bias, gate),
        SCALED=rows.shares is not None,
        WHOLE=inputs % sizes.inner == 0,
        **constants,
        **sizes.options,
    )
    return y
