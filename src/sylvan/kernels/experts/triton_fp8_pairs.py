"""FP8 experts times rows rounded to e4m3, on GPUs with FP8 units: a grouped, scaled GEMM.

Scales as in `matmul.triton_fp8`: of rows and outputs, or of 128 inputs of each, as DeepSeek-V3 has
them. Rows are rounded once for all their experts, unless routing scales inputs.
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
from sylvan.kernels.matmul.triton_fp8 import E4M3, fp8_sums, quantised_rows
from sylvan.kernels.matmul.weights import CodedWeight


@triton.jit(do_not_specialize=["row_tiles"])
def fp8_pairs_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    pair_ptr,
    owner_ptr,
    row_tiles,
    outputs,
    inputs,
    groups,
    alpha,
    limit,
    PAIRS_OF_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CLAMP: tl.constexpr,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of e4m3 rows of pairs times the e4m3 matrix of the tile's expert, transposed."""
    inputs_ready(EARLY)
    expert, pair, real, col_tile = pairs_of_tile(
        pair_ptr, owner_ptr, row_tiles, outputs, ROWS, COLS
    )
    if expert >= 0:
        row = pair.to(tl.int64) // PAIRS_OF_ROW
        col = col_tile * COLS + tl.arange(0, COLS)
        feature = feature_of(col, outputs, GATE)
        line = expert.to(tl.int64) * outputs + feature
        k = tl.arange(0, INNER)
        acc = fp8_sums(
            x_ptr + row[:, None] * inputs + k[None, :],
            w_ptr + line[None, :] * inputs + k[:, None],
            x_scale_ptr + row * groups,
            w_scale_ptr + line * groups,
            real,
            col < outputs,
            inputs,
            GROUPED,
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


def fp8_pairs(
    rows: PairRows, stack: CodedWeight, bias: torch.Tensor | None, gate: ExpertGate | None
) -> torch.Tensor:
    """Round rows without shares to e4m3, and multiply them by a stack that takes such rows."""
    assert rows.shares is None
    _, outputs, inputs = stack.shape
    q, scale = quantised_rows(rows.x, stack.group)
    sizes = tile("fp8", len(q), q.element_size(), arch_of(q))
    y = rows.outputs(outputs, gate)
    launch_early(
        fp8_pairs_kernel,
        (rows.places.row_tiles * ceil_div(outputs, sizes.cols),),
        q,
        scale,
        stack.q.view(E4M3),
        stack.scale,
        scale if bias is None else bias,
        y,
        outputs=outputs,
        inputs=inputs,
        groups=scale.shape[1],
        **pair_arguments(rows, bias, gate),
        GROUPED=stack.group != 0,
        **(sizes.options | {"ROWS": rows.places.rows}),
    )
    return y
