"""The definition of correct, in PyTorch: rows sorted by expert, one matrix product an expert."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sylvan.kernels.experts.routing import Routing, route
from sylvan.kernels.experts.weights import ExpertWeights
from sylvan.kernels.gating import glu


def experts(
    x_TD: torch.Tensor, logits_TE: torch.Tensor, routing: Routing, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `experts.experts`."""
    ids_TK, shares_TK = route(logits_TE, routing)
    num_rows, top_k = ids_TK.shape
    order = ids_TK.flatten().argsort(stable=True)  # pairs of row and expert, by expert
    load_E = ids_TK.flatten().bincount(minlength=logits_TE.shape[-1])
    inputs = x_TD[order // top_k]
    shares = shares_TK.flatten()
    if routing.scale_inputs:
        inputs = (inputs.float() * shares[order, None]).to(x_TD.dtype)
        shares = torch.ones_like(shares)
    outputs = inputs.new_empty(len(order), weights.down.shape[1])
    start = 0
    for expert, count in enumerate(load_E.tolist()):
        if count:
            rows = slice(start, start + count)
            outputs[rows] = _feed_forward(inputs[rows], expert, weights)
            start += count
    back = torch.empty_like(outputs)
    back[order] = outputs
    pairs_TKD = back.float().unflatten(0, (num_rows, top_k))
    total_TD = (pairs_TKD * shares.unflatten(0, (num_rows, top_k))[..., None]).sum(1)
    return total_TD.to(x_TD.dtype), load_E


def _feed_forward(x: torch.Tensor, expert: int, weights: ExpertWeights) -> torch.Tensor:
    biases = (weights.gate_up_bias, weights.down_bias)
    up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
    gate_up = F.linear(x, weights.gate_up[expert], up_bias)
    if weights.limit is None:
        return F.linear(glu(gate_up, weights.act), weights.down[expert], down_bias)
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
    h = (up + 1) * gate * torch.sigmoid(gate * weights.alpha)
    return F.linear(h.to(x.dtype), weights.down[expert], down_bias)
