"""Reference in PyTorch: rows are sorted by expert; one matrix product per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sylvan.kernels.api import DispatchedRows, ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts.exchange import sum_by_owner, sum_dispatched
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
    load_E = ids_TK.flatten().bincount(minlength=logits_TE.shape[-1])
    load = load_E if load is None else load.add_(load_E)
    expert_ranks = weights.expert_ranks
    if expert_ranks is not None and expert_ranks.dispatcher is not None:

        def sums(rows: DispatchedRows) -> torch.Tensor:
            found = _outputs(rows.x_RD, rows.ids_RK, rows.weights_RK, routing, weights)
            return _weighted(found, rows.weights_RK, found.on_all()).to(x_TD.dtype)

        return sum_dispatched(expert_ranks, x_TD, ids_TK, weights_TK, sums), load
    held_TK = ids_TK if expert_ranks is None else expert_ranks.dispatch(ids_TK)
    found = _outputs(x_TD, held_TK, weights_TK, routing, weights)
    if expert_ranks is not None and expert_ranks.all_to_all:
        factors_TK = found.factors(weights_TK)
        whole = sum_by_owner(expert_ranks, ids_TK, found.outputs_PD, found.pairs, factors_TK)
        return whole.to(x_TD.dtype), load
    if expert_ranks is None:
        every = found.on_all()
    else:
        every = expert_ranks.combine(found.outputs_PD, found.pairs, ids_TK.numel())
    return _weighted(found, weights_TK, every).to(x_TD.dtype), load


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs of the pairs that are computed here, sorted by expert.

    Attributes:
        outputs_PD: The outputs.
        pairs: Indices of these pairs, int64.
        count: Number of all pairs.
        is_weighted: Whether the inputs were multiplied by routing weights.
    """

    outputs_PD: torch.Tensor
    pairs: torch.Tensor
    count: int
    is_weighted: bool

    def on_all(self) -> torch.Tensor:
        """Outputs of all pairs, in order; zeros where another rank computes it."""
        back = self.outputs_PD.new_zeros(self.count, self.outputs_PD.shape[1])
        back[self.pairs] = self.outputs_PD
        return back

    def factors(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Weights of the outputs in the sums of rows."""
        return torch.ones_like(weights_TK) if self.is_weighted else weights_TK


def _weighted(found: _Outputs, weights_TK: torch.Tensor, outputs_PD: torch.Tensor) -> torch.Tensor:
    """Weighted sums of all pairs' outputs, in float32. Shape: (T, D)."""
    outputs_TKD = outputs_PD.float().unflatten(0, tuple(weights_TK.shape))
    return (outputs_TKD * found.factors(weights_TK)[..., None]).sum(1)


def _outputs(
    x_TD: torch.Tensor,
    held_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
) -> _Outputs:
    """Compute the pairs whose expert is here; `held_TK` says at which place, -1: elsewhere."""
    held, top_k = held_TK.flatten(), held_TK.shape[1]
    order = held.argsort(stable=True)[int((held < 0).sum()) :]  # pairs computed here, by expert
    inputs = x_TD[order // top_k]
    if routing.scale_inputs:
        inputs = (inputs.float() * weights_TK.flatten()[order, None]).to(x_TD.dtype)
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
    return _Outputs(outputs, order, held.numel(), routing.scale_inputs)


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
