"""The definition of correct, in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.weights import QuantisedWeight


def embedding(ids: torch.Tensor, weight: LinearWeight, scale: float) -> torch.Tensor:
    if isinstance(weight, QuantisedWeight):
        return weight.rows(ids) * scale
    assert isinstance(weight, torch.Tensor)
    return F.embedding(ids.long(), weight).float() * scale


def part_embedding(
    ids: torch.Tensor, weight: LinearWeight, scale: float, part_from: int
) -> torch.Tensor:
    """See `embed.embedding` with `part_from`."""
    rows, cols = weight.shape
    if not rows:
        return torch.zeros(len(ids), cols, device=ids.device)
    local_T = ids.long() - part_from
    is_here_T = (local_T >= 0) & (local_T < rows)
    return embedding(local_T.where(is_here_T, 0), weight, scale) * is_here_T[:, None]
