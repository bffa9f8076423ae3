"""Token embeddings."""

from __future__ import annotations

from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, X
from sylvan.runtime.layers.build import Build


class Embedding(nn.Module):
    """Rows of a table, times `scale`. The table may be the same object as the head's weight."""

    weight: LinearWeight

    def __init__(self, build: Build, num_ids: int, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = build.empty(num_ids, dim)
        self.scale = scale

    def forward(self, ids_T: X) -> X:
        """Shape: (T,) -> float32 (T, D)."""
        return ops.embedding(ids_T, self.weight, self.scale)
