"""Experts of a single row on GPUs: matrix-vector products of its experts' weights.

Nothing is sorted or padded to tiles. A program of the first product does a few columns of one
expert; a program of the second does a few columns of all experts of the row, and sums them.

Shapes: E experts, K experts of the row, D hidden, F inner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ExpertWeights, Routing
from sylvan.kernels.gating.triton_gating import clamp_arguments, gated
from sylvan.kernels.gpu.launch import arch_of, launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two, tile
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.matmul.triton_linear import row_inputs, row_weights


@triton.jit
def _gate_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    id_ptr,
    share_ptr,
    h_ptr,
    inner,
    inputs,
    alpha,
    limit,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CLAMP: tl.constexpr,
    WHOLE: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, k): COLS gated columns of the row's k-th expert."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    nth = tl.program_id(1)
    wanted = col < inner
    k = tl.arange(0, INNER)
    inputs_ready(EARLY)
    first = tl.load(id_ptr + nth).to(tl.int64) * 2 * inner
    at = weight_ptr + (first + col)[:, None] * inputs + k[None, :]
    up_at = weight_ptr + (first + inner + col)[:, None] * inputs + k[None, :]
    acc = tl.zeros([COLS, INNER], tl.float32)
    up_acc = tl.zeros([COLS, INNER], tl.float32)
    for start in range(0, inputs, INNER):
        x = row_inputs(x_ptr, start, k, inputs, WHOLE)
        if SCALED:
            share = tl.load(share_ptr + nth)
            x = (x * share).to(x_ptr.dtype.element_ty).to(tl.float32)
        acc += row_weights(at, start, k, wanted, inputs, WHOLE) * x
        up_acc += row_weights(up_at, start, k, wanted, inputs, WHOLE) * x
    gate, up = tl.sum(acc, 1), tl.sum(up_acc, 1)
    if BIAS:
        gate += tl.load(bias_ptr + first + col, mask=wanted, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + first + inner + col, mask=wanted, other=0.0).to(tl.float32)
    # round where the reference stores
    gate = gate.to(h_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(h_ptr.dtype.element_ty).to(tl.float32)
    h = gated(gate, up, alpha, limit, GATE, CLAMP)
    tl.store(h_ptr + nth * inner + col, h.to(h_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _down_kernel(
    h_ptr,
    weight_ptr,
    bias_ptr,
    id_ptr,
    share_ptr,
    out_ptr,
    load_ptr,
    outputs,
    inner,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """COLS outputs: the weighted sum over the row's experts, in the order of experts."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    wanted = col < outputs
    k = tl.arange(0, INNER)
    inputs_ready(EARLY)
    total = tl.zeros([COLS], tl.float32)
    for nth in tl.static_range(TOP_K):
        first = tl.load(id_ptr + nth).to(tl.int64) * outputs
        at = weight_ptr + (first + col)[:, None] * inner + k[None, :]
        acc = tl.zeros([COLS, INNER], tl.float32)
        for start in range(0, inner, INNER):
            x = row_inputs(h_ptr + nth * inner, start, k, inner, WHOLE)
            acc += row_weights(at, start, k, wanted, inner, WHOLE) * x
        y = tl.sum(acc, 1)
        if BIAS:
            y += tl.load(bias_ptr + first + col, mask=wanted, other=0.0).to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        if SCALED:
            y = y * tl.load(share_ptr + nth)
        total += y
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=wanted)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERT_BLOCK)
        load = tl.zeros([EXPERT_BLOCK], tl.int64)
        if COUNTED:
            load = tl.load(load_ptr + expert, mask=expert < EXPERTS, other=0)
        for nth in tl.static_range(TOP_K):
            load += (expert == tl.load(id_ptr + nth)).to(tl.int64)
        tl.store(load_ptr + expert, load, mask=expert < EXPERTS)


def row_experts(
    x_1D: torch.Tensor,
    chosen: tuple[torch.Tensor, torch.Tensor],
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`experts` for one row, with routed ids and weights; dense 16-bit matrices only."""
    ids_K, shares_K = chosen[0].flatten(), chosen[1].flatten()
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    num_experts, outputs, inner = down.shape
    arch = arch_of(x_1D)
    into, out_of = tile("row gate", outputs, 2, arch), tile("row down", inner, 2, arch)
    h_KF = x_1D.new_empty(len(ids_K), inner)
    alpha, limit, form = clamp_arguments(weights.clamping)
    launch_early(
        _gate_kernel,
        (ceil_div(inner, into.cols), len(ids_K)),
        x_1D.contiguous(),
        gate_up,
        gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        ids_K,
        shares_K,
        h_KF,
        inner,
        outputs,
        alpha,
        limit,
        SCALED=routing.scale_inputs,
        BIAS=weights.gate_up_bias is not None,
        GATE=weights.act,
        CLAMP=form,
        WHOLE=outputs % into.inner == 0 and inner % into.cols == 0,
        COLS=into.cols,
        INNER=into.inner,
        num_warps=into.warps,
    )
    out_1D = torch.empty_like(x_1D)
    load_E = ids_K.new_empty(num_experts, dtype=torch.int64) if load is None else load
    launch_early(
        _down_kernel,
        (ceil_div(outputs, out_of.cols),),
        h_KF,
        down,
        down if weights.down_bias is None else weights.down_bias,
        ids_K,
        shares_K,
        out_1D,
        load_E,
        outputs,
        inner,
        TOP_K=len(ids_K),
        EXPERTS=num_experts,
        EXPERT_BLOCK=power_of_two(num_experts),
        COUNTED=load is not None,
        SCALED=not routing.scale_inputs,
        BIAS=weights.down_bias is not None,
        WHOLE=inner % out_of.inner == 0 and outputs % out_of.cols == 0,
        COLS=out_of.cols,
        INNER=out_of.inner,
        num_warps=out_of.warps,
    )
    return out_1D, load_E
