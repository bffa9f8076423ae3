"""Mixture of experts: routes rows to experts, and runs the feed-forward of each expert.

Shapes: T rows, E experts, K experts of a row, D hidden, F inner.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import ExpertRanks, ExpertWeights, Routing, TracedTensor, X
from sylvan.kernels.experts import reference
from sylvan.kernels.experts.routing import route
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.matmul.weights import CodedWeight

__all__ = ["ExpertRanks", "ExpertWeights", "Routing", "experts", "route"]

_experts = KernelDispatch("experts.experts", reference.experts)


def experts(
    x: X,
    logits: X,
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None = None,
) -> X:
    """Route each row of x (T, D) by its logits (T, E) and sum its experts' outputs.

    A row's experts are summed in the order of their numbers, whatever the other rows are and
    whichever rank holds the expert (with `weights.expert_ranks` all ranks pass the same rows).
    `load`, int64 (E,): the number of rows per expert is added to it.

    Returns: (T, D) in the dtype of x.
    """
    if isinstance(x, TracedTensor):
        assert isinstance(logits, TracedTensor)
        return x.tracer.experts(x, logits, routing, weights, load)
    assert isinstance(logits, torch.Tensor)
    stacks = weights.gate_up, weights.down
    known = all(isinstance(stack, torch.Tensor | CodedWeight) for stack in stacks)
    known = known and routing.has_kernels
    expert_ranks = weights.expert_ranks
    if expert_ranks is not None:
        known = (
            known
            and not expert_ranks.all_to_all
            and weights.lora is None
            and x.device.type != "cpu"
        )
    compute = _experts.on(x) if known else reference.experts
    return compute(x, logits, routing, weights, load)[0]
