"""Token embeddings."""

from __future__ import annotations

from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import LinearWeight, X
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Split


class Embedding(nn.Module):
    """Looks up rows of a table and multiplies them by `scale`; the LM head may share the table.

    `lora` is set if requests may use adapters; it holds their unsharded matrices on every rank.
    """

    weight: LinearWeight
    lora: LoraLayer | None = None

    def __init__(self, build: Build, num_ids: int | Split, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = build.empty(num_ids, dim)
        self.scale = scale

    def forward(self, ids_T: X) -> X:
        """Shape: (T,) -> float32 (T, D)."""
        rows_TD = self.looked_up(ids_T)
        return rows_TD if self.lora is None else ops.lora_embedding(ids_T, rows_TD, self.lora)

    def looked_up(self, ids_T: X) -> X:
        """`forward` without adapters."""
        return ops.embedding(ids_T, self.weight, self.scale)


class VocabEmbedding(Embedding):
    """An embedding sharded over ranks: each looks up its own rows, and the results are added."""

    def __init__(self, build: Build, num_ids: int, dim: int, scale: float = 1.0) -> None:
        self._rows = build.mesh.rows(num_ids)
        self._ranks = build.mesh.tp
        super().__init__(build, Split(self._rows), dim, scale)

    def looked_up(self, ids_T: X) -> X:
        if self._ranks.size == 1:
            return super().looked_up(ids_T)
        weight, start = self.weight, self._rows.start
        mine_TD = ops.embedding(ids_T, weight, self.scale, part_from=start)
        return ops.all_reduce(mine_TD, self._ranks)
