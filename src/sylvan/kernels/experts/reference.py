"""The definition of correct, in PyTorch: rows sorted by expert, one matrix product an expert."""

from __future__ import annotations

import torch

from sylvan.kernels.api import ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts.routing import route
from sylvan.kernels.gating import glu
from sylvan.kernels.matmul.reference import linear
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight


def experts(
    x_TD: torch.Tensor, logits_TE: torch.Tensor, routing: Routing, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as `experts.experts`, and how many rows each expert had: int64 (E,)."""
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
    gate_up = _linear(x, weights.gate_up, weights.gate_up_bias, expert)
    if weights.limit is None:
        return _linear(glu(gate_up, weights.act), weights.down, weights.down_bias, expert)
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
    h = (up + 1) * gate * torch.sigmoid(gate * weights.alpha)
    return _linear(h.to(x.dtype), weights.down, weights.down_bias, expert)


def _linear(
    x: torch.Tensor, stack: LinearWeight, biases: LinearWeight | None, expert: int
) -> torch.Tensor:
    assert isinstance(stack, torch.Tensor | Int8Weight | Int4Weight)
    assert biases is None or isinstance(biases, torch.Tensor)
    bias = None if biases is None else biases[expert]
    return linear(x, stack[expert], bias, out_f32=False)
