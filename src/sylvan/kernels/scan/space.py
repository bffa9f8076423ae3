"""Selective state spaces: Mamba, and Mamba 2, whose channels share their decay by head.

Shapes: T rows, H heads, P channels of a head, N numbers of state a channel, G groups, S slots.
Mamba itself has heads of one channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.scan.spans import Spans, scan


@dataclass(frozen=True, slots=True)
class SpaceInputs:
    """`decay`: -exp(A_log): (H,), or (H, N) if channels differ."""

    x_THP: torch.Tensor
    dt_TH: torch.Tensor
    decay: torch.Tensor
    b_TGN: torch.Tensor
    c_TGN: torch.Tensor
    skip_H: torch.Tensor


def space_scan(inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans) -> torch.Tensor:
    """With h = exp(dt A) h + dt x B: C h + D x, in float32. Shape: (T, H, P)."""
    x_THP, dt_TH = inputs.x_THP.float(), inputs.dt_TH.float()
    heads = x_THP.shape[1]
    b_THN, c_THN = (
        t.float().repeat_interleave(heads // t.shape[1], 1) for t in (inputs.b_TGN, inputs.c_TGN)
    )
    decay_HN = inputs.decay.float().view(heads, -1)

    def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dt_nH = dt_TH[rows]
        keep = torch.exp(dt_nH[..., None] * decay_HN)[:, :, None]
        take = (dt_nH[..., None] * x_THP[rows])[..., None] * b_THN[rows][:, :, None]
        new = held * keep + take
        return new, (new * c_THN[rows][:, :, None]).sum(-1)

    out_THP = scan(state_SHPN, spans, torch.empty_like(x_THP), step)
    return out_THP + inputs.skip_H.float()[:, None] * x_THP
