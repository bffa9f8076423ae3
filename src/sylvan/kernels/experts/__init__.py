"""Mixtures of experts: which experts a token goes to, and their grouped feed-forward.

Shapes: T rows, E experts, K experts of a row, D hidden, F inner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import ActivationKind, Unsupported, Value, X
from sylvan.kernels.experts import reference
from sylvan.kernels.experts.routing import Routing, route

__all__ = ["ExpertWeights", "Routing", "experts", "route"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """All experts of a layer. `limit` None: act(gate) * up; else GPT-OSS's clamped form of it."""

    gate_up: torch.Tensor  # (E, 2 F, D), gate then up
    down: torch.Tensor  # (E, D, F)
    gate_up_bias: torch.Tensor | None = None  # (E, 2 F)
    down_bias: torch.Tensor | None = None  # (E, D)
    act: ActivationKind = "silu"
    alpha: float = 1.0
    limit: float | None = None


def experts(x: X, logits: X, routing: Routing, weights: ExpertWeights) -> tuple[X, torch.Tensor]:
    """Route each row of x (T, D) by its logits (T, E) and sum its experts' outputs.

    The experts of a row are added in the order of their numbers, whatever the other rows are.

    Returns: (T, D) in the dtype of x, and how many rows each expert had: int64 (E,).
    """
    if isinstance(x, Value):
        raise Unsupported("mixtures of experts")
    assert isinstance(logits, torch.Tensor)
    return reference.experts(x, logits, routing, weights)
