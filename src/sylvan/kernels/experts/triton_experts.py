"""Fused mixture of experts on GPUs: rows are grouped by expert, then multiplied by grouped GEMMs.

As in vLLM's and SGLang's fused MoE, pairs of a row and an expert are aligned such that each tile
of rows belongs to one expert. Each of the two products is one launch over the tiles of all experts;
the first one also applies the gate. The last kernel sums the experts of a row, in the order of
their numbers. The row counts of experts stay on the device.

Shapes: T rows, E experts, K experts of a row, P = T K pairs, D hidden, F inner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import DispatchedRows, ExpertWeights, Routing
from sylvan.kernels.experts.exchange import sum_dispatched
from sylvan.kernels.experts.triton_pairs import ExpertGate, PairRows
from sylvan.kernels.experts.triton_places import ExpertTiles
from sylvan.kernels.experts.triton_product import product, tile_for
from sylvan.kernels.experts.triton_route import route
from sylvan.kernels.experts.triton_row import row_experts
from sylvan.kernels.gating.triton_gating import glu
from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.lora.reference import Pairs, lora_experts

_SUM_BLOCK = 1024


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


def experts(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_TK, weights_TK = route(logits_TE, routing)
    if weights.expert_ranks is not None:
        return _spread_experts(x_TD, ids_TK, weights_TK, routing, weights, load)
    num_rows, top_k = ids_TK.shape
    num_experts = weights.down.shape[0]
    average = ceil_div(num_rows * top_k, num_experts)
    dense = isinstance(weights.gate_up, torch.Tensor)
    has_adapters = weights.lora is not None and bool(weights.lora[0].rows.groups)
    halves = x_TD.dtype in (torch.bfloat16, torch.float16)
    if num_rows == 1 and dense and halves and not has_adapters:
        return row_experts(x_TD, (ids_TK, weights_TK), routing, weights, load)
    sizes = tile_for(weights, average, x_TD)
    places = ExpertTiles.of(ids_TK, num_experts, sizes.rows)
    scaled = weights_TK if routing.scale_inputs else None
    rows = PairRows(x_TD.contiguous(), places, top_k, scaled)
    gate = ExpertGate(weights.act, weights.clamping)
    into = (weights.gate_up, weights.gate_up_bias)
    out_of = (weights.down, weights.down_bias)
    if weights.lora is not None and has_adapters:
        gate_up = product(rows, into, sizes)
        rows_P = torch.arange(num_rows, device=x_TD.device).repeat_interleave(top_k)
        pairs = Pairs(rows_P, ids_TK.flatten().long())
        x_PD = x_TD[rows_P] if scaled is None else rows.apart().x
        lora_experts(x_PD, gate_up, pairs, weights.lora[0])
        h_PF = glu(gate_up, weights.act, weights.clamping)
        pairs_PD = product(PairRows(h_PF, places), out_of, sizes)
        lora_experts(h_PF, pairs_PD, pairs, weights.lora[1])
    else:
        h_PF = product(rows, into, sizes, gate)
        pairs_PD = product(PairRows(h_PF, places), out_of, sizes)
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
    """`experts` of which this rank has some: it adds up theirs, and then all ranks add up."""
    expert_ranks = weights.expert_ranks
    assert expert_ranks is not None
    if expert_ranks.dispatcher is None:
        held_TK = expert_ranks.dispatch(ids_TK)
        own_TD = _own_sums(x_TD, held_TK, weights_TK, routing, weights)
        total_TD = expert_ranks.ranks.all_sum(own_TD).to(x_TD.dtype)
    else:

        def sums(rows: DispatchedRows) -> torch.Tensor:
            own_RD = _own_sums(rows.x_RD, rows.ids_RK, rows.weights_RK, routing, weights)
            return own_RD.to(x_TD.dtype)

        total_TD = sum_dispatched(expert_ranks, x_TD, ids_TK, weights_TK, sums)
    if load is None:
        load = ids_TK.new_zeros(len(expert_ranks.slots_EC), dtype=torch.int64)
    ones = torch.ones_like(ids_TK, dtype=torch.int64).flatten()
    return total_TD, load.scatter_add_(0, ids_TK.flatten().long(), ones)


def _own_sums(
    x_TD: torch.Tensor,
    held_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
) -> torch.Tensor:
    """Weighted sums of this rank's experts in float32; `held_TK` says which, -1: elsewhere.

    Pairs of other ranks go to an expert after the last one, whose tiles have no owner.
    """
    assert weights.expert_ranks is not None
    top_k, count = held_TK.shape[1], weights.down.shape[0]
    held_TK = torch.where(held_TK < 0, count, held_TK).to(torch.int32)
    sizes = tile_for(weights, ceil_div(held_TK.numel(), count * weights.expert_ranks.groups), x_TD)
    places = ExpertTiles.of(held_TK, count + 1, sizes.rows)
    places.owners.masked_fill_(places.owners == count, -1)
    scaled = weights_TK if routing.scale_inputs else None
    gate = ExpertGate(weights.act, weights.clamping)
    into, out_of = (weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)
    h_PF = product(PairRows(x_TD.contiguous(), places, top_k, scaled), into, sizes, gate)
    pairs_PD = product(PairRows(h_PF, places), out_of, sizes)
    own_TK = (held_TK < count)[..., None]  # others were not written
    outputs = torch.where(own_TK, pairs_PD.unflatten(0, held_TK.shape).float(), 0.0)
    if scaled is None:
        outputs = outputs * weights_TK[..., None]
    return outputs.sum(1)
