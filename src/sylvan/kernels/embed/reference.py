"""The definition of correct, in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight


def embedding(ids: torch.Tensor, weight: LinearWeight, scale: float) -> torch.Tensor:
    """See `embed.embedding`."""
    if isinstance(weight, Int8Weight | Int4Weight):
        return weight.rows(ids) * scale
    assert isinstance(weight, torch.Tensor)
    return F.embedding(ids.long(), weight).float() * scale
