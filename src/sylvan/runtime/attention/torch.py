"""Attention by PyTorch's fused kernels, request by request: the fallback on every device.

Each step waits for the device once, to learn where requests lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from sylvan.kernels.paged import reference
from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


@dataclass(frozen=True, slots=True)
class _Span:
    """One request: its rows of the step, its pages and its length with KV."""

    rows: slice
    pages: torch.Tensor  # int64 (pages,)
    kv_len: int


class TorchAttention:
    """Per request: gather its pages once a layer, then `scaled_dot_product_attention`."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "rocm", "xpu"}),
        batch_invariant=True,
        kv_dtypes=frozenset({"model", "fp8_e4m3"}),
    )

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._masks: dict[tuple[int, int, int | None, bool], torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Find each request's rows and pages; masks are made once per shape."""
        self._masks.clear()
        self._spans.clear()
        starts, lens = batch.q_starts_R.tolist(), batch.kv_lens_R.tolist()
        for r, row in enumerate(batch.req_slots_R.tolist()):
            pages = batch.page_table_SP[row, : -(-lens[r] // batch.kv.page_size)].long()
            self._spans.append(_Span(slice(starts[r], starts[r + 1]), pages, lens[r]))

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        batch.kv.store(spec.index, batch.out_slots_T, k_TKH, v_TKH)
        keys, values = batch.kv.layer(spec.index)
        out_TNH = q_TNH.new_empty(len(q_TNH), spec.num_heads, spec.value_dim)
        plain = spec.softcap is None and spec.sinks is None
        for span in self._spans:
            q = q_TNH[span.rows]
            k_SKH, v_SKH = (
                x[span.pages].flatten(0, 1)[: span.kv_len].to(q.dtype) for x in (keys, values)
            )
            if plain:
                out_TNH[span.rows] = self._fused(q, k_SKH, v_SKH, spec)
            else:
                out = reference.attend(q, k_SKH, v_SKH, spec)
                out_TNH[span.rows] = out.unflatten(1, (spec.num_heads, spec.value_dim))
        return out_TNH

    def _fused(
        self, q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, spec: AttentionLayer
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_SKH, v_SKH))
        mask = self._mask(len(q_TNH), len(k_SKH), spec, q_TNH.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _mask(
        self, rows: int, kv_len: int, spec: AttentionLayer, device: torch.device
    ) -> torch.Tensor | None:
        """True where a query may look; None if everywhere."""
        sees_all = not spec.causal or rows == 1
        if sees_all and (spec.window is None or spec.window >= kv_len):
            return None
        key = rows, kv_len, spec.window, spec.causal
        if key not in self._masks:
            position = torch.arange(kv_len, device=device)
            own = position[kv_len - rows :, None]
            mask = position <= own if spec.causal else torch.ones_like(position <= own)
            if spec.window is not None:
                mask = mask & (position > own - spec.window)
            self._masks[key] = mask
        return self._masks[key]


BACKEND = TorchAttention
