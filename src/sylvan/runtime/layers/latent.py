"""Multi-head latent attention over the compressed KV pool.

Shapes: T rows, D hidden, N heads.
"""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, Rope, TracedTensor, X
from sylvan.kernels.latent import LatentParts, LatentShape
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel
from sylvan.runtime.layers.mesh import Share, Split
from sylvan.runtime.layers.norm import RMSNorm

_EPS = 1e-6  # epsilon of latent norms, independent of the model's


class LatentAttention(nn.Module):
    """Computes keys and values from a latent vector; queries too, if `q_rank` is set.

    Without `use_rope`, nothing is rotated.

    Ranks share the heads, and each keeps the latent vectors of all tokens. With `Mesh.row_groups`
    (attention data parallelism) a rank has all heads, and only the latent vectors of its own
    requests. `shape` and `layer` count this rank's `heads`.
    """

    def __init__(
        self,
        build: Build,
        dim: int,
        heads: Share,
        shape: LatentShape,
        layer: AttentionLayer,
        q_rank: int | None,
    ) -> None:
        super().__init__()
        self._shape, self._layer = shape, layer
        self._rope: Rope | None = None
        self._scales: torch.Tensor | None = None
        self.row_groups = build.mesh.row_groups
        queries = Split(heads.times(shape.nope + shape.rope_dim))
        self.q_rank = q_rank
        if q_rank is None:
            self.q_proj = ColumnParallel(build, dim, queries)
        else:
            self.q_a_proj = Linear(build, dim, (q_rank,), bias=False)
            self.q_a_layernorm = RMSNorm(build, q_rank, _EPS)
            self.q_b_proj = ColumnParallel(build, q_rank, queries)
        joined = (shape.latent + shape.rope_dim,)
        self.kv_a_proj_with_mqa = Linear(build, dim, joined, bias=False)
        self.kv_a_layernorm = RMSNorm(build, shape.latent, _EPS)
        both = Split(heads.times(shape.nope + shape.value))
        self.kv_b_proj = ColumnParallel(build, shape.latent, both)
        self.o_proj = RowParallel(build, heads.times(shape.value), dim)

    def use_rope(self, rope: Rope) -> None:
        """Set the rotary table."""
        self._rope = rope

    def scale_by(self, scales: torch.Tensor | None) -> None:
        """Set factors of queries by position, float32 (positions,)."""
        self._scales = scales

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D), the same on every rank."""
        if self.row_groups is None:
            return self.of_rows(x_TD, batch)
        return self.row_groups.attend(self.of_rows, x_TD, batch)

    def of_rows(self, x_TD: X, batch: ForwardBatch) -> X:
        """Attend for rows whose KV this rank holds."""
        if self.q_rank is None:
            q = self.q_proj(x_TD)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))[0])
        norm = self.kv_a_layernorm.of_heads()
        parts = LatentParts(self._shape, self.kv_b_proj.weight, norm, self._rope, self._scales)
        kv = self.kv_a_proj_with_mqa(x_TD)
        if isinstance(q, TracedTensor) or isinstance(kv, TracedTensor):
            assert isinstance(q, TracedTensor)
            assert isinstance(kv, TracedTensor)
            return self.o_proj(ops.latent_attention(q, kv, parts, self._layer))
        q_TNC, k_T1C = ops.latent_heads(q, kv, parts, batch.positions_T)
        value_T1C = k_T1C[..., : self._shape.latent]
        out_TNC = batch.attention.run(self._layer, q_TNC, k_T1C, value_T1C, batch)
        return self.o_proj(ops.latent_output(out_TNC, parts))
