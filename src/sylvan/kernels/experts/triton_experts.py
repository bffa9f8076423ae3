"""Fused mixture of experts on GPUs: rows are grouped by expert, then multiplied by grouped GEMMs.

As in vLLM's and SGLang's fused MoE, pairs of a row and an expert are aligned such that each tile
of rows belongs to one expert. Each of the two products is one launch over the tiles of all experts;
the first one also applies the gate. The last kernel sums the experts of a row, in the order of
their numbers. The row counts of experts stay on the device.

Shapes: T rows, E experts, K experts of a row, P = T K pairs, D hidden, F inner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ActivationKind, Clamping, ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts.triton_places import ExpertTiles
from sylvan.kernels.experts.triton_route import route
from sylvan.kernels.experts.triton_row import row_experts
from sylvan.kernels.gating.triton_gating import clamp_arguments, gated, glu
from sylvan.kernels.gpu.launch import arch_of, launch_early
from sylvan.kernels.gpu.tiles import Tile, ceil_div, tile
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.lora.reference import Pairs, lora_experts
from sylvan.kernels.matmul.triton_codes import coded_tile, codes_of
from sylvan.kernels.matmul.weights import CodedWeight

_SUM_BLOCK = 1024
_GROUP = tl.constexpr(8)  # row tiles that use a column of weights in turn, for L2 reuse


@triton.jit(do_not_specialize=["row_tiles"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    share_ptr,
    y_ptr,
    pair_ptr,
    owner_ptr,
    row_tiles,
    outputs,
    inputs,
    x_stride,
    alpha,
    limit,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    groups,
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
    program = tl.program_id(0)
    col_tiles = (outputs + COLS - 1) // COLS
    in_group = _GROUP * col_tiles
    first_tile = program // in_group * _GROUP
    group_tiles = tl.minimum(row_tiles - first_tile, _GROUP)
    row_tile = first_tile + program % in_group % group_tiles
    col_tile = program % in_group // group_tiles
    expert = tl.load(owner_ptr + row_tile)
    placed = tl.load(pair_ptr + row_tile * ROWS + tl.arange(0, ROWS))
    if expert >= 0:
        real = placed >= 0
        pair = tl.maximum(placed, 0).to(tl.int64)
        col = col_tile * COLS + tl.arange(0, COLS)
        wanted = col < outputs
        feature = col // 2 + col % 2 * (outputs // 2) if GATE != "" else col
        k = tl.arange(0, INNER)
        x_at = x_ptr + (pair // PAIRS_OF_ROW)[:, None] * x_stride + k[None, :]
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
        if BIAS:
            bias = tl.load(bias_ptr + expert * outputs + feature, mask=wanted, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        y = acc.to(y_ptr.dtype.element_ty)
        if GATE != "":
            gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS, COLS // 2, 2]))
            passed = gated(gate, up, alpha, limit, GATE, CLAMP).to(y_ptr.dtype.element_ty)
            out = col_tile * (COLS // 2) + tl.arange(0, COLS // 2)
            out_at = y_ptr + pair[:, None] * (outputs // 2) + out[None, :]
            tl.store(out_at, passed, mask=real[:, None] & (out < outputs // 2)[None, :])
        else:
            y_at = y_ptr + pair[:, None] * outputs + col[None, :]
            tl.store(y_at, y, mask=real[:, None] & wanted[None, :])


@triton.jit
def _sum_kernel(
    y_ptr,
    share_ptr,
    out_ptr,
    width,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum the weighted outputs of a row's experts, in the order of the experts."""
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        y = tl.load(y_ptr + pair * width + col, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            y = y * tl.load(share_ptr + pair)
        total += y
    tl.store(out_ptr + row * width + col, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class _Gate:
    """The gated activation: act(gate) * up, within limits or not."""

    act: ActivationKind
    clamping: Clamping | None


def experts(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_TK, weights_TK = route(logits_TE, routing)
    if weights.spread is not None:
        return _spread_experts(x_TD, ids_TK, weights_TK, routing, weights, load)
    num_rows, top_k = ids_TK.shape
    num_experts = weights.down.shape[0]
    average = ceil_div(num_rows * top_k, num_experts)
    dense = isinstance(weights.gate_up, torch.Tensor)
    has_adapters = weights.lora is not None and bool(weights.lora[0].rows.groups)
    halves = x_TD.dtype in (torch.bfloat16, torch.float16)
    if num_rows == 1 and dense and halves and not has_adapters:
        return row_experts(x_TD, (ids_TK, weights_TK), routing, weights, load)
    op = "experts" if dense else "coded experts"
    sizes = tile(op, average, x_TD.element_size(), arch_of(x_TD))
    places = ExpertTiles.of(ids_TK, num_experts, sizes.rows)
    x_TD = x_TD.contiguous()
    scaled = weights_TK if routing.scale_inputs else None
    gate = _Gate(weights.act, weights.clamping)
    into = (weights.gate_up, weights.gate_up_bias)
    out_of = (weights.down, weights.down_bias)
    if weights.lora is not None and has_adapters:
        gate_up = _product(x_TD, into, places, sizes, top_k, shares=scaled)
        rows_P = torch.arange(num_rows, device=x_TD.device).repeat_interleave(top_k)
        pairs, x_PD = Pairs(rows_P, ids_TK.flatten().long()), x_TD[rows_P]
        if scaled is not None:
            x_PD = (x_PD.float() * scaled.flatten()[:, None]).to(x_TD.dtype)
        lora_experts(x_PD, gate_up, pairs, weights.lora[0])
        h_PF = glu(gate_up, weights.act, weights.clamping)
        pairs_PD = _product(h_PF, out_of, places, sizes, 1)
        lora_experts(h_PF, pairs_PD, pairs, weights.lora[1])
    else:
        h_PF = _product(x_TD, into, places, sizes, top_k, shares=scaled, gate=gate)
        pairs_PD = _product(h_PF, out_of, places, sizes, 1)
    out_TD = torch.empty_like(x_TD)
    launch_early(
        _sum_kernel,
        (num_rows, ceil_div(out_TD.shape[1], _SUM_BLOCK)),
        pairs_PD,
        weights_TK,
        out_TD,
        out_TD.shape[1],
        TOP_K=top_k,
        SCALED=scaled is None,
        BLOCK=_SUM_BLOCK,
    )
    return out_TD, places.load_E if load is None else load.add_(places.load_E)


def _spread_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`experts` of which this rank has some: it adds up theirs, and then all ranks add up.

    Pairs of other ranks go to an expert after the last one, whose tiles have no owner.
    """
    assert weights.spread is not None
    top_k, count = ids_TK.shape[1], weights.down.shape[0]
    held_TK = weights.spread.dispatch(ids_TK)
    held_TK = torch.where(held_TK < 0, count, held_TK).to(torch.int32)
    op = "experts" if isinstance(weights.gate_up, torch.Tensor) else "coded experts"
    average = ceil_div(ids_TK.numel(), count * weights.spread.groups)
    sizes = tile(op, average, x_TD.element_size(), arch_of(x_TD))
    places = ExpertTiles.of(held_TK, count + 1, sizes.rows)
    places.owners.masked_fill_(places.owners == count, -1)
    scaled = weights_TK if routing.scale_inputs else None
    gate = _Gate(weights.act, weights.clamping)
    into, out_of = (weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)
    h_PF = _product(x_TD.contiguous(), into, places, sizes, top_k, shares=scaled, gate=gate)
    pairs_PD = _product(h_PF, out_of, places, sizes, 1)
    own_TK = (held_TK < count)[..., None]  # others were not written
    outputs = torch.where(own_TK, pairs_PD.unflatten(0, held_TK.shape).float(), 0.0)
    if scaled is None:
        outputs = outputs * weights_TK[..., None]
    total_TD = weights.spread.ranks.all_sum(outputs.sum(1))
    if load is None:
        load = ids_TK.new_zeros(len(weights.spread.slots_EC), dtype=torch.int64)
    ones = torch.ones_like(ids_TK, dtype=torch.int64).flatten()
    return total_TD.to(x_TD.dtype), load.scatter_add_(0, ids_TK.flatten().long(), ones)


_DENSE = {"CODE": "", "FOUR": False, "GROUP": 0, "ZEROS": False, "SHIFTS": False}


def _codes(
    stack: torch.Tensor | CodedWeight,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int, dict[str, Any]]:
    """Kernel arguments of a stack of matrices, plain or quantised."""
    if isinstance(stack, torch.Tensor):
        return stack, (stack,) * 4, 0, _DENSE
    (matrix, *rest), constants = codes_of(stack)
    return matrix, tuple(rest), stack.scale.shape[-1], constants


def _product(
    x: torch.Tensor,
    weight: tuple[LinearWeight, LinearWeight | None],
    places: ExpertTiles,
    sizes: Tile,
    pairs_of_row: int,
    *,
    shares: torch.Tensor | None = None,
    gate: _Gate | None = None,
) -> torch.Tensor:
    """Row p is row p // pairs_of_row of x times its expert's matrix, plus bias, gated if asked."""
    stack, bias = weight
    assert isinstance(stack, torch.Tensor | CodedWeight)
    assert bias is None or isinstance(bias, torch.Tensor)
    _, outputs, inputs = stack.shape
    matrix, coded, groups, constants = _codes(stack)
    if isinstance(stack, CodedWeight) and stack.order is not None:
        x = x.index_select(-1, stack.order)
    assert matrix.is_contiguous()
    alpha, limit, form = clamp_arguments(None if gate is None else gate.clamping)
    y = x.new_empty(len(x) * pairs_of_row, outputs if gate is None else outputs // 2)
    launch_early(
        _product_kernel,
        (places.row_tiles * ceil_div(outputs, sizes.cols),),
        x,
        matrix,
        matrix if bias is None else bias,
        x if shares is None else shares,
        y,
        places.pairs,
        places.owners,
        places.row_tiles,
        outputs,
        inputs,
        x.stride(0),
        alpha,
        limit,
        *coded,
        groups,
        PAIRS_OF_ROW=pairs_of_row,
        SCALED=shares is not None,
        BIAS=bias is not None,
        GATE="" if gate is None else gate.act,
        CLAMP=form,
        WHOLE=inputs % sizes.inner == 0,
        **constants,
        ROWS=sizes.rows,
        COLS=sizes.cols,
        INNER=sizes.inner,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return y
