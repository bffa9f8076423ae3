"""Attention over the paged KV cache, from the fused projection to the heads' output.

Shapes: T rows, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, AttentionVariant, Rope, TracedTensor, X
from sylvan.kernels.paged import reference
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch, FusedAttention
from sylvan.runtime.layers.norm import RMSNorm


class PagedAttention(nn.Module):
    """Norms heads, applies rotary positions, stores KV and attends; a single op when traced."""

    def __init__(
        self,
        layer: AttentionLayer,
        rope: Rope | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rope = rope
        # Stored without registration: the norms are parameters of the module that made them.
        self._q_norm = None if q_norm is None else q_norm.of_heads()
        self._k_norm = None if k_norm is None else k_norm.of_heads()

    @property
    def reads_pages(self) -> bool:
        """Whether it gathers keys and values itself on a CPU, from pages that tensors can view."""
        return False

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        norms = self._q_norm, self._k_norm
        shares_rows = any(norm is not None and norm.over is not None for norm in norms)
        if isinstance(qkv, TracedTensor):
            return ops.attention(qkv, self.layer, self.rope, *norms)
        assert isinstance(qkv, torch.Tensor)
        by_itself = _heeds_scales(self.layer, batch)
        if batch.attention.caps.from_projection and by_itself and not shares_rows:
            fused = cast("FusedAttention", batch.attention)
            return fused.run_fused(self.layer, qkv, self.rope, norms, batch).flatten(1)
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self.rope, norms)
        return _run(self.layer, heads, batch).flatten(1)


class RaggedAttention(PagedAttention):
    """Bidirectional attention within each request of the step, without a KV cache."""

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        if isinstance(qkv, TracedTensor):
            return super().forward(qkv, batch)
        assert isinstance(qkv, torch.Tensor)
        norms = self._q_norm, self._k_norm
        heads = reference.split_heads(qkv, self.layer, batch.positions_T, self.rope, norms)
        ends = batch.row_ends
        ends_T = None if ends is None else torch.from_numpy(ends).to(qkv.device)
        return ops.ragged_attention(*heads, batch.q_starts_R.tolist(), self.layer, ends_T)


class SpecialAttention(PagedAttention):
    """Paged attention with features that few models have (Llama 4, Ministral 3, Hunyuan)."""

    def __init__(
        self,
        layer: AttentionLayer,
        rope: Rope | None,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        variant: AttentionVariant,
    ) -> None:
        super().__init__(layer, rope, q_norm, k_norm)
        self._variant = variant
        self._with_variant = replace(
            layer, chunk=variant.chunk, slopes=variant.slopes, biases=variant.biases
        )

    @property
    def reads_pages(self) -> bool:
        """See `PagedAttention`."""
        variant = self._variant
        return not (variant.chunk is None and variant.slopes is None and variant.biases is None)

    def forward(self, qkv: X, batch: ForwardBatch) -> X:
        """Shape: (T, (N + 2 K) H) -> (T, N H)."""
        variant = self._variant
        if isinstance(qkv, TracedTensor):
            norms = self._q_norm, self._k_norm
            return ops.attention(qkv, self.layer, self.rope, *norms, variant)
        assert isinstance(qkv, torch.Tensor)
        norms, positions_T = (self._q_norm, self._k_norm), batch.positions_T
        before = (None, None) if variant.norm_last else norms
        q, k, v = reference.split_heads(qkv, self.layer, positions_T, self.rope, before)
        if variant.norm_last:
            q, k = (
                reference.head_norm(x.float(), norm).to(qkv.dtype)
                for x, norm in zip((q, k), norms, strict=True)
            )
        if variant.query_scales is not None:
            q = (q.float() * variant.query_scales[positions_T.long(), None, None]).to(qkv.dtype)
        if not self.reads_pages:
            return _run(self.layer, (q, k, v), batch).flatten(1)
        caps = batch.attention.caps
        if caps.variants and (variant.biases is None or caps.biases):
            return _run(self._with_variant, (q, k, v), batch).flatten(1)
        return _attend(self._with_variant, (q, k, v), batch).flatten(1)


def _heeds_scales(layer: AttentionLayer, batch: ForwardBatch) -> bool:
    """Whether the backend applies the layer's scales of keys and values itself, if it has any."""
    return layer.kv_scales is None or batch.attention.caps.kv_scales


def _run(
    layer: AttentionLayer,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: ForwardBatch,
) -> torch.Tensor:
    """Attend; scale queries, keys, values and outputs here if the backend knows no KV scales."""
    scales = layer.kv_scales
    if scales is None or _heeds_scales(layer, batch):
        return batch.attention.run(layer, *heads, batch)
    group, (q, k, v) = layer.num_heads // layer.num_kv_heads, heads
    k_scale, v_scale = (x[:, None].to(q.dtype) for x in (scales.keys, scales.values))
    q = q * k_scale.repeat_interleave(group, 0)
    out = batch.attention.run(layer, q, k / k_scale, v / v_scale, batch)
    return out * v_scale.repeat_interleave(group, 0)


def _name(layer: AttentionLayer) -> str:
    if layer.chunk is not None:
        return f"attention in chunks of {layer.chunk} tokens"
    return "relative position bias (T5)" if layer.biases is not None else "ALiBi"


def _attend(
    layer: AttentionLayer,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: ForwardBatch,
) -> torch.Tensor:
    """Attend within chunks, request by request. Shape: (T, N, V)."""
    q_TNH, k_TKH, v_TKH = heads
    if q_TNH.device.type != "cpu":
        shorter = f", or set context_len to {layer.chunk}" if layer.chunk else ""
        way_out = "use device=cpu" if layer.biases is not None else "choose attention=triton"
        raise ConfigError(
            f"{_name(layer)} is not available on {q_TNH.device.type} with this attention backend: "
            f"{way_out}{shorter}"
        )
    batch.kv.store(layer.index, batch.slots_of(layer.index), k_TKH, v_TKH)
    keys, values = batch.kv.layer(layer.index)
    out_TNV = q_TNH.new_empty(len(q_TNH), layer.num_heads, layer.value_dim)
    size, starts = batch.kv.page_size, batch.q_starts_R.tolist()
    table_SP = batch.table_of(layer.index)
    reqs = zip(batch.req_slots_R.tolist(), batch.kv_lens_R.tolist(), strict=True)
    for r, (slot, length) in enumerate(reqs):
        first = length - (starts[r + 1] - starts[r])
        chunk = layer.chunk or length
        for low in range(first // chunk * chunk, length, chunk):
            high = min(low + chunk, length)
            rows = slice(starts[r] + max(low, first) - first, starts[r] + high - first)
            pages = table_SP[slot, low // size : -(-high // size)].long()
            inside = slice(low % size, low % size + high - low)
            k_SKH, v_SKV = (x[pages].flatten(0, 1)[inside].to(q_TNH.dtype) for x in (keys, values))
            found = reference.attend(q_TNH[rows], k_SKH, v_SKV, layer)
            out_TNV[rows] = found.unflatten(1, (layer.num_heads, layer.value_dim))
    return out_TNV
