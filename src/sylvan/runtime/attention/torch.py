"""Attention by PyTorch's fused kernels: the fallback on every device.

Attends request by request; on GPUs for many requests in one call, if this PyTorch can. Each step
waits for the device once, to read the rows and lengths of its requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from sylvan.kernels.paged import reference
from sylvan.kernels.paged.varlen import Packed, attend_packed, find_varlen, suits
from sylvan.runtime.attention.api import (
    AttentionCaps,
    AttentionLayer,
    ForwardBatch,
    ends_of,
    first_seen,
)

_PACKED_TOKENS = 1 << 16  # tokens whose keys and values are gathered at once


@dataclass(frozen=True, slots=True)
class _Request:
    """Rows of a request in the step, its row of the page tables, and its tokens with KV."""

    rows: slice
    slot: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of a request that layers with one window and KV group attend to."""

    rows: slice
    pages: torch.Tensor  # int64 (pages,)
    kv_len: int
    first: int  # first token of these pages


class TorchAttention:
    """Gathers the pages of a layer, and calls `varlen_attn` or `scaled_dot_product_attention`."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "rocm", "xpu"}),
        kv_dtypes=frozenset({"model", "fp8_e4m3", "fp8_e5m2"}),
        row_ends=True,
    )

    def __init__(self, varlen: Any = None) -> None:
        """`varlen`: replaces PyTorch's function in tests; None: use it on GPUs if available."""
        self._given = varlen
        self._varlen: Any = None
        self._requests: list[_Request] = []
        # By KV group and window; filled by the first such layer of a step.
        self._packs: dict[tuple[int, int | None], list[Packed]] = {}
        self._spans: dict[tuple[int, int | None], list[_Span]] = {}
        self._masks: dict[tuple[int, int, int | None, bool], torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Read each request's rows. Layers find pages and masks, and share them within the step."""
        self._masks.clear()
        self._spans.clear()
        self._packs.clear()
        starts, lens = batch.q_starts_R.tolist(), batch.kv_lens_R.tolist()
        self._requests = [
            _Request(slice(starts[r], starts[r + 1]), slot, lens[r])
            for r, slot in enumerate(batch.req_slots_R.tolist())
        ]
        self._varlen = self._given or (find_varlen() if batch.q_starts_R.is_cuda else None)

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        batch.kv.store(spec.index, batch.slots_of(spec.index), k_TKH, v_TKH)
        keys, values = batch.kv.layer(spec.index)
        out_TNH = q_TNH.new_empty(len(q_TNH), spec.num_heads, spec.value_dim)
        spans = self._spans_of(spec, batch)
        is_causal = batch.ends(spec) is None
        if self._varlen and suits(q_TNH, spec) and is_causal:
            for packed in self._packs_of(spec, batch):
                q = q_TNH[packed.rows]
                out_TNH[packed.rows] = attend_packed(self._varlen, q, (keys, values), packed, spec)
            return out_TNH
        plain = spec.softcap is None and spec.sinks is None and is_causal
        for span in spans:
            q = q_TNH[span.rows]
            k_SKH, v_SKH = (
                x[span.pages].flatten(0, 1)[: span.kv_len].to(q.dtype) for x in (keys, values)
            )
            if plain:
                out_TNH[span.rows] = self._fused(q, k_SKH, v_SKH, spec)
            else:
                ends = ends_of(batch, spec, span.rows, span.first)
                out = reference.attend(q, k_SKH, v_SKH, spec, ends_T=ends)
                out_TNH[span.rows] = out.unflatten(1, (spec.num_heads, spec.value_dim))
        return out_TNH

    def _spans_of(self, spec: AttentionLayer, batch: ForwardBatch) -> list[_Span]:
        """Return the visible part of each request, from its first page with a visible token on."""
        key = batch.kv.layer_groups[spec.index], spec.window
        if key not in self._spans:
            table_SP, size = batch.table_of(spec.index), batch.kv.page_size
            self._spans[key] = [_seen(request, spec, table_SP, size) for request in self._requests]
        return self._spans[key]

    def _packs_of(self, spec: AttentionLayer, batch: ForwardBatch) -> list[Packed]:
        key = batch.kv.layer_groups[spec.index], spec.window
        if key not in self._packs:
            self._packs[key] = _pack(self._spans_of(spec, batch), batch.kv.page_size)
        return self._packs[key]

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
        """Attention mask, True where a query may attend; None: everywhere."""
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


def _seen(request: _Request, spec: AttentionLayer, table_SP: torch.Tensor, size: int) -> _Span:
    rows, kv_len = request.rows, request.kv_len
    first = first_seen(spec, kv_len - (rows.stop - rows.start)) // size
    pages = table_SP[request.slot, first : -(-kv_len // size)].long()
    return _Span(rows, pages, kv_len - first * size, first * size)


def _pack(spans: list[_Span], page_size: int) -> list[Packed]:
    """Group neighbouring requests, as many as the memory limit allows."""
    packs: list[Packed] = []
    some: list[_Span] = []
    for span in spans:
        if some and sum(s.kv_len for s in some) + span.kv_len > _PACKED_TOKENS:
            packs.append(_packed(some, page_size))
            some = []
        some.append(span)
    return [*packs, _packed(some, page_size)] if some else packs


def _packed(spans: list[_Span], page_size: int) -> Packed:
    device = spans[0].pages.device
    offset = torch.arange(page_size, device=device)
    places = [(s.pages[:, None] * page_size + offset).flatten()[: s.kv_len] for s in spans]
    first = spans[0].rows.start
    q_starts = [s.rows.start - first for s in spans] + [spans[-1].rows.stop - first]
    k_starts = [0, *itertools.accumulate(s.kv_len for s in spans)]
    return Packed(
        rows=slice(first, spans[-1].rows.stop),
        slots_S=torch.cat(places),
        q_starts_R1=torch.tensor(q_starts, dtype=torch.int32, device=device),
        k_starts_R1=torch.tensor(k_starts, dtype=torch.int32, device=device),
        max_rows=max(s.rows.stop - s.rows.start for s in spans),
        max_tokens=max(s.kv_len for s in spans),
    )


BACKEND = TorchAttention
