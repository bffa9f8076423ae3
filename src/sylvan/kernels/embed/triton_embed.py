"""Embedding rows on GPUs."""

from __future__ import annotations

import torch

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.embed import reference
from sylvan.kernels.rows.triton_rows import gather


def embedding(ids: torch.Tensor, weight: LinearWeight, scale: float) -> torch.Tensor:
    """Look rows up; a quantised table uses the PyTorch reference."""
    if not isinstance(weight, torch.Tensor):
        return reference.embedding(ids, weight, scale)
    return gather(weight, ids, scale, torch.float32)
