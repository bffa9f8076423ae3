"""Attention over the paged KV cache, from the fused projection to the heads' output.

Shapes: T rows, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, Rope, TracedTensor, Unsupported, X
from sylvan.kernels.paged import reference
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch, FusedAttention
from sylvan.runtime.layers.norm import RMSNorm


class PagedAttention(nn.Module):
    """Head norms, rotary positions, KV store and attention: one op when traced."""

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
        norms = self._q_norm, self._k_norm
        shares_rows = any(norm is not None and norm.over is not None for norm in norms)
        if isinstance(qkv, TracedTensor):
            if shares_rows:
                raise Unsupported("norms of rows that ranks share")
            return ops.attention(qkv, self.layer, self._rope, *norms)
        assert isinstance(qkv, torch.Tensor)
        if batch.attention.caps.from_projection and not shares_rows:
            fused = cast("FusedAttention", batch.attention)
            return fused.run_fused(self.layer, qkv, self._rope, norms, batch).flatten(1)
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self._rope, norms)
        return batch.attention.run(self.layer, *heads, batch).flatten(1)


class RaggedAttention(PagedAttention):
    """As `PagedAttention`, but every token sees its whole text, and no KV is kept."""

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        if isinstance(qkv, TracedTensor):
            return super().forward(qkv, batch)
        assert isinstance(qkv, torch.Tensor)
        norms = self._q_norm, self._k_norm
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self._rope, norms)
        return ops.ragged_attention(*heads, batch.q_starts_R.tolist(), self.layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Special:
    """What the attention of few families does besides; step programs lack it.

    `chunk`: tokens see those of their own chunk of so many. `query_scales`: float32 (positions,),
    by which queries are multiplied at last. `norm_last`: norms of heads follow positions. `slopes`:
    float32 (N,), by which scores of a head fall with each token of distance.
    """

    chunk: int | None = None
    query_scales: torch.Tensor | None = None
    norm_last: bool = False
    slopes: torch.Tensor | None = None

    @property
    def names(self) -> str:
        """For refusals."""
        if self.chunk is not None:
            return f"attention in chunks of {self.chunk} tokens"
        if self.slopes is not None:
            return "biases by distance (ALiBi)"
        return "norms of heads after positions" if self.norm_last else "scaled queries"


class SpecialAttention(PagedAttention):
    """As `PagedAttention`, with what is special (Llama 4, Ministral 3, Hunyuan)."""

    def __init__(
        self,
        layer: AttentionLayer,
        rope: Rope | None,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        special: Special,
    ) -> None:
        super().__init__(layer, rope, q_norm, k_norm)
        self._special = special

    @property
    def reads_pages(self) -> bool:
        """Whether it gathers keys and values by itself, from pages that tensors can read."""
        return self._special.chunk is not None or self._special.slopes is not None

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        special, positions_T = self._special, batch.positions_T
        if isinstance(qkv, TracedTensor):
            raise Unsupported(special.names)
        assert isinstance(qkv, torch.Tensor)
        norms = self._q_norm, self._k_norm
        before = (None, None) if special.norm_last else norms
        q, k, v = reference.split_heads(qkv, self.layer, positions_T, self._rope, before)
        if special.norm_last:
            q, k = (
                reference.head_norm(x.float(), norm).to(qkv.dtype)
                for x, norm in zip((q, k), norms, strict=True)
            )
        if special.query_scales is not None:
            q = (q.float() * special.query_scales[positions_T.long(), None, None]).to(qkv.dtype)
        if not self.reads_pages:
            return batch.attention.run(self.layer, q, k, v, batch).flatten(1)
        return _attend(self.layer, special, (q, k, v), batch).flatten(1)


def _attend(
    layer: AttentionLayer,
    special: Special,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: ForwardBatch,
) -> torch.Tensor:
    """Each token attends to those of its chunk, request by request. Shape: (T, N, V)."""
    q_TNH, k_TKH, v_TKH = heads
    if q_TNH.device.type != "cpu":
        shorter = f"; set context_len to {special.chunk}" if special.chunk else ""
        raise ConfigError(f"{special.names} cannot be had on {q_TNH.device.type}{shorter}")
    batch.kv.store(layer.index, batch.slots_of(layer.index), k_TKH, v_TKH)
    keys, values = batch.kv.layer(layer.index)
    out_TNV = q_TNH.new_empty(len(q_TNH), layer.num_heads, layer.value_dim)
    size, starts = batch.kv.page_size, batch.q_starts_R.tolist()
    table_SP = batch.table_of(layer.index)
    reqs = zip(batch.req_slots_R.tolist(), batch.kv_lens_R.tolist(), strict=True)
    for r, (slot, length) in enumerate(reqs):
        first = length - (starts[r + 1] - starts[r])
        chunk = special.chunk or length
        for low in range(first // chunk * chunk, length, chunk):
            high = min(low + chunk, length)
            rows = slice(starts[r] + max(low, first) - first, starts[r] + high - first)
            pages = table_SP[slot, low // size : -(-high // size)].long()
            inside = slice(low % size, low % size + high - low)
            k_SKH, v_SKV = (x[pages].flatten(0, 1)[inside].to(q_TNH.dtype) for x in (keys, values))
            found = reference.attend(q_TNH[rows], k_SKH, v_SKV, layer, special.slopes)
            out_TNV[rows] = found.unflatten(1, (layer.num_heads, layer.value_dim))
    return out_TNV
