"""Gated delta rule: a key-value memory that decays, and is corrected by each new key.

Shapes: T rows, H heads, K key numbers, V value numbers, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.scan.spans import Spans, scan

EPS = 1e-6
"""Added to the squared norm of a key or query before normalising it."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """`decay` are logarithms. Queries and keys may have fewer heads than values.

    Attributes:
        decay: Of heads (T, H), or of each key number of a head (T, H, K).
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    decay: torch.Tensor
    beta_TH: torch.Tensor

    @property
    def by_key(self) -> bool:
        """Whether each key number decays by itself (KDA)."""
        return self.decay.dim() == 3


def delta_scan(inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans) -> torch.Tensor:
    """The gated delta rule, with queries and keys normalised to unit length; float32 (T, H, V)."""
    v_THV = inputs.v_THV.float()
    groups = v_THV.shape[1] // inputs.k_THK.shape[1]
    q_THK, k_THK = (
        _unit(t.float()).repeat_interleave(groups, 1) for t in (inputs.q_THK, inputs.k_THK)
    )
    q_THK = q_THK * q_THK.shape[-1] ** -0.5
    keep, beta_TH = inputs.decay.float().exp(), inputs.beta_TH.float()
    keep_THK = keep if inputs.by_key else keep[..., None]

    def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_nHK1 = k_THK[rows][..., None]
        held = held * keep_THK[rows][..., None]
        error = (v_THV[rows] - (held * k_nHK1).sum(-2)) * beta_TH[rows][..., None]
        held = held + k_nHK1 * error[:, :, None]
        return held, (held * q_THK[rows][..., None]).sum(-2)

    return scan(state_SHKV, spans, torch.empty_like(v_THV), step)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
