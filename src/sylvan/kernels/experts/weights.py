"""Weights of all experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import ActivationKind


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
