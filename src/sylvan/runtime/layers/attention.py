"""Attention over the paged KV cache, from the fused projection to the heads' output.

Shapes: T rows, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, Rope, Unsupported, Value, X
from sylvan.kernels.paged import reference
from sylvan.runtime.core.forward import ForwardBatch, FusedAttention
from sylvan.runtime.layers.norm import RMSNorm


class PagedAttention(nn.Module):
    """Head norms, rotary positions, KV store and attention: one op when recorded."""

    def __init__(
        self,
        layer: AttentionLayer,
        rope: Rope | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._rope = rope
        # Plain references: the norms are parameters of the module that made them.
        self._q_norm = None if q_norm is None else q_norm.of_heads()
        self._k_norm = None if k_norm is None else k_norm.of_heads()

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        if isinstance(qkv, Value):
            return ops.attention(qkv, self.layer, self._rope, self._q_norm, self._k_norm)
        assert isinstance(qkv, torch.Tensor)
        norms = self._q_norm, self._k_norm
        if batch.attention.caps.from_projection:
            fused = cast("FusedAttention", batch.attention)
            return fused.run_fused(self.layer, qkv, self._rope, norms, batch).flatten(1)
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self._rope, norms)
        return batch.attention.run(self.layer, *heads, batch).flatten(1)


class RaggedAttention(PagedAttention):
    """As `PagedAttention`, but every token sees its whole text, and no KV is kept."""

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        if isinstance(qkv, Value):
            raise Unsupported("attention in both directions")
        assert isinstance(qkv, torch.Tensor)
        norms = self._q_norm, self._k_norm
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self._rope, norms)
        return ops.ragged_attention(*heads, batch.q_starts_R.tolist(), self.layer)
