"""Reference in PyTorch: rows are sorted by expert; one matrix product per expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sylvan.kernels.api import ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts.exchange import sum_by_owner
from sylvan.kernels.experts.routing import route
from sylvan.kernels.gating import glu
from sylvan.kernels.lora.reference import Pairs, lora_experts
from sylvan.kernels.matmul.reference import linear
from sylvan.kernels.matmul.weights import QuantisedWeight


def experts(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `experts.experts`, and the rows per expert, added to a given `load`."""
    ids_TK, weights_TK = route(logits_TE, routing)
    num_rows, top_k = ids_TK.shape
    expert_ranks = weights.expert_ranks
    held = (ids_TK if expert_ranks is None else expert_ranks.dispatch(ids_TK)).flatten()
    order = held.argsort(stable=True)[int((held < 0).sum()) :]  # pairs computed here, by expert
    load_E = ids_TK.flatten().bincount(minlength=logits_TE.shape[-1])
    inputs = x_TD[order // top_k]
    shares = weights_TK.flatten()
    if routing.scale_inputs:
        inputs = (inputs.float() * shares[order, None]).to(x_TD.dtype)
        shares = torch.ones_like(shares)
    into, out_of = weights.lora or (None, None)
    pairs = Pairs(order // top_k, held[order].long())
    counts = held[order].bincount(minlength=weights.down.shape[0]).tolist()
    gate_up = _linear(inputs, weights.gate_up, weights.gate_up_bias, counts)
    if into is not None:
        lora_experts(inputs, gate_up, pairs, into)
    inner = glu(gate_up, weights.act, weights.clamping)
    outputs = _linear(inner, weights.down, weights.down_bias, counts)
    if out_of is not None:
        lora_experts(inner, outputs, pairs, out_of)
    if expert_ranks is not None and expert_ranks.all_to_all:
        whole = sum_by_owner(expert_ranks, ids_TK, outputs, order, shares.view_as(ids_TK))
        return whole.to(x_TD.dtype), load_E if load is None else load.add_(load_E)
    if expert_ranks is None:
        back = torch.empty_like(outputs)
        back[order] = outputs
    else:
        back = expert_ranks.combine(outputs, order, num_rows * top_k)
    pairs_TKD = back.float().unflatten(0, (num_rows, top_k))
    total_TD = (pairs_TKD * shares.unflatten(0, (num_rows, top_k))[..., None]).sum(1)
    return total_TD.to(x_TD.dtype), load_E if load is None else load.add_(load_E)


def _linear(
    x: torch.Tensor, stack: LinearWeight, biases: LinearWeight | None, counts: Sequence[int]
) -> torch.Tensor:
    """Multiply rows, sorted by expert with `counts` rows each, by the matrix of their expert."""
    assert isinstance(stack, torch.Tensor | QuantisedWeight)
    assert biases is None or isinstance(biases, torch.Tensor)
    out = x.new_empty(len(x), stack.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            bias = None if biases is None else biases[expert]
            out[rows] = linear(x[rows], stack[expert], bias, out_f32=False)
            start += count
    return out
