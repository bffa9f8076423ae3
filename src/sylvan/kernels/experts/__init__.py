"""Mixtures of experts: which experts a token goes to, and their grouped feed-forward.

Shapes: T rows, E experts, K experts of a row, D hidden, F inner.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import Unsupported, Value, X
from sylvan.kernels.experts import reference
from sylvan.kernels.experts.routing import Routing, route
from sylvan.kernels.experts.weights import ExpertWeights
from sylvan.kernels.gpu.choice import Choice

__all__ = ["ExpertWeights", "Routing", "experts", "route"]

_experts = Choice(reference.experts, "sylvan.kernels.experts.triton_experts")


def experts(x: X, logits: X, routing: Routing, weights: ExpertWeights) -> tuple[X, torch.Tensor]:
    """Route each row of x (T, D) by its logits (T, E) and sum its experts' outputs.

    The experts of a row are added in the order of their numbers, whatever the other rows are.

    Returns: (T, D) in the dtype of x, and how many rows each expert had: int64 (E,).
    """
    if isinstance(x, Value):
        raise Unsupported("mixtures of experts")
    assert isinstance(logits, torch.Tensor)
    return _experts.on(x)(x, logits, routing, weights)
