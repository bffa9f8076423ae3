"""Block-sparse attention (Phi-3-small): to near blocks, and to every n-th block before them.

Each head sees other far blocks, so all heads together see every token.

Shapes: T rows of a request, N query heads, K key heads, H columns, S tokens of the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sylvan.kernels.api import AttentionLayer, BlockPattern, Rope, TracedTensor, Unsupported, X
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
            raise Unsupported("block-sparse attention")
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
            k_SKH, v_SKH = (x[pages].flatten(0, 1)[:length].float() for x in (keys, values))
            rows = slice(starts[r], starts[r + 1])
            out_TNH[rows] = self._of_request(q_TNH[rows], k_SKH, v_SKH).to(out_TNH.dtype)
        return out_TNH.flatten(1)

    def _of_request(
        self, q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor
    ) -> torch.Tensor:
        """Attend for the last rows of one request. Shape: float32 (T, N, H)."""
        times, length = q_TNH.shape[1] // k_SKH.shape[1], len(k_SKH)
        k_NHS = k_SKH.repeat_interleave(times, 1).permute(1, 2, 0)
        v_NSH = v_SKH.repeat_interleave(times, 1).transpose(0, 1)
        first, parts = length - len(q_TNH), list[torch.Tensor]()
        step = max(1, _MAX_SCORES // (q_TNH.shape[1] * length))
        for start in range(0, len(q_TNH), step):
            q_NTH = q_TNH[start : start + step].float().transpose(0, 1)
            hidden = self._hidden(first + start, q_NTH.shape[1], length, len(q_NTH))
            scores_NTS = q_NTH @ k_NHS * self.layer.scale
            scores_NTS = scores_NTS.masked_fill(hidden.to(scores_NTS.device), float("-inf"))
            parts.append((scores_NTS.softmax(-1) @ v_NSH).transpose(0, 1))
        return torch.cat(parts)

    def _hidden(self, first: int, rows: int, length: int, heads: int) -> torch.Tensor:
        """Mask of the tokens that rows from position `first` on do not see: bool (N, rows, S)."""
        pattern = self._pattern
        own, tokens = torch.arange(first, first + rows)[:, None], torch.arange(length)
        shift_N11 = torch.tensor(pattern.shifts(heads))[:, None, None]
        block = tokens // pattern.size
        passed = (block + shift_N11) % pattern.stride != 0
        return (tokens > own) | ((own // pattern.size - block >= pattern.near) & passed)
