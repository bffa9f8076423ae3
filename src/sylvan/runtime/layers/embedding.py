"""Token embeddings."""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, Unsupported, X
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Split


class Embedding(nn.Module):
    """Rows of a table, times `scale`. The table may be the same object as the head's weight."""

    weight: LinearWeight

    def __init__(self, build: Build, num_ids: int | Split, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = build.empty(num_ids, dim)
        self.scale = scale

    def forward(self, ids_T: X) -> X:
        """Shape: (T,) -> float32 (T, D)."""
        return ops.embedding(ids_T, self.weight, self.scale)


class VocabEmbedding(Embedding):
    """Rows of a table that is divided among ranks: each looks up its own, and all are added."""

    def __init__(self, build: Build, num_ids: int, dim: int, scale: float = 1.0) -> None:
        self._rows = build.mesh.rows(num_ids)
        self._ranks = build.mesh.tp
        super().__init__(build, Split(self._rows), dim, scale)

    def forward(self, ids_T: X) -> X:
        """Shape: (T,) -> float32 (T, D)."""
        if self._ranks.size == 1:
            return super().forward(ids_T)
        if not isinstance(ids_T, torch.Tensor):
            raise Unsupported("a vocabulary that ranks share")
        rows = self._rows
        local_T = ids_T.long() - rows.start
        is_mine_T = (local_T >= 0) & (local_T < rows.size)
        if rows.size:
            found_TD = ops.embedding(local_T.where(is_mine_T, 0), self.weight, self.scale)
        else:
            found_TD = torch.zeros(len(ids_T), self.weight.shape[1], device=ids_T.device)
        return ops.all_reduce(found_TD * is_mine_T[:, None], self._ranks)
