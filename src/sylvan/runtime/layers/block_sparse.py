"""Block-sparse attention (Phi-3-small): to near blocks, and to every n-th block before them.

Each head sees other far blocks, so all heads together see every token.

Shapes: T rows of a request, N query heads, K key heads, H columns, S tokens of the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, BlockPattern, Rope, TracedTensor, X
from sylvan.kernels.paged import reference
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import PagedAttention

_MAX_SCORES = 1 << 24  # at a time


class BlockSparseAttention(PagedAttention):
    """Attends by the pattern; leaves sequences that fit into near blocks to the backend."""

    def __init__(self, layer: AttentionLayer, rope: Rope | None, pattern: BlockPattern) -> None:
        super().__init__(layer, rope)
        self._pattern, self._with_blocks = pattern, replace(layer, blocks=pattern)

    @property
    def reads_pages(self) -> bool:
        """See `PagedAttention`."""
        return True

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        if isinstance(qkv, TracedTensor):
            return ops.attention(qkv, self._with_blocks, self.rope)
        found: Any = self._attended(qkv, batch)
        return found

    def _attended(self, qkv: Any, batch: ForwardBatch) -> torch.Tensor:
        layer, positions_T = self.layer, batch.positions_T
        heads = reference.split_heads(qkv, layer, positions_T, self.rope, (None, None))
        if batch.attention.caps.blocks:
            return batch.attention.run(self._with_blocks, *heads, batch).flatten(1)
        if int(batch.kv_lens_R.max()) <= self._pattern.dense:
            return batch.attention.run(layer, *heads, batch).flatten(1)
        q_TNH, k_TKH, v_TKH = heads
        batch.kv.store(layer.index, batch.slots_of(layer.index), k_TKH, v_TKH)
        keys, values = batch.kv.layer(layer.index)
        table_SP, size = batch.table_of(layer.index), batch.kv.page_size
        out_TNH, starts = torch.empty_like(q_TNH), batch.q_starts_R.tolist()
        reqs = zip(batch.req_slots_R.tolist(), batch.kv_lens_R.tolist(), strict=True)
        for r, (slot, length) in enumerate(reqs):
            pages = table_SP[slot, : -(-length // size)].long()
            k_SKH, v_SKH = (x[pages].flatten(0, 1)[:length].to(q_TNH) for x in (keys, values))
            rows = slice(starts[r], starts[r + 1])
            out_TNH[rows] = self._of_request(q_TNH[rows], k_SKH, v_SKH)
        return out_TNH.flatten(1)

    def _of_request(
        self, q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the last rows of a request. Shape: (T, N, H)."""
        heads, length = q_TNH.shape[1], len(k_SKH)
        first, step = length - len(q_TNH), max(1, _MAX_SCORES // (heads * length))
        parts = list[torch.Tensor]()
        for start in range(0, len(q_TNH), step):
            some, seen = q_TNH[start : start + step], first + min(start + step, len(q_TNH))
            parts.append(reference.attend(some, k_SKH[:seen], v_SKH[:seen], self._with_blocks))
        return torch.cat(parts).unflatten(1, (heads, -1))
