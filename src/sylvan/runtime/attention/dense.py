"""Attention in PyTorch that never waits for the device, so graphs can capture it.

Every row is compared with all pages that its request could have. So it is slow, and needs memory
for rows times the longest context. For tests, and devices without attention kernels.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch

_BLOCK_BYTES = 64 << 20  # of gathered keys at once


class DenseAttention:
    """Reads lengths and pages on the device only. Rows without a request give zeros."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "rocm", "xpu"}),
        row_ends=True,
        graph_capture=True,
        runners=frozenset({"eager", "graph"}),
        kv_dtypes=frozenset({"model", "fp8_e4m3", "fp8_e5m2"}),
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: lengths and pages are read by each layer."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        batch.kv.store(spec.index, batch.slots_of(spec.index), k_TKH, v_TKH)
        out_TNH = q_TNH.new_empty(len(q_TNH), spec.num_heads, spec.value_dim)
        longest = batch.page_tables.shape[2] * batch.kv.page_size
        width = max(1, _BLOCK_BYTES // (4 * longest * spec.num_kv_heads * spec.head_dim))
        for start in range(0, len(q_TNH), width):
            rows = slice(start, start + width)
            out_TNH[rows] = _block(spec, q_TNH[rows], start, batch)
        return out_TNH


def _block(
    spec: AttentionLayer, q_TNH: torch.Tensor, start: int, batch: ForwardBatch
) -> torch.Tensor:
    """Attend for a block of rows. Shapes: L tokens of the longest context, G = N / K."""
    row_T = torch.arange(start, start + len(q_TNH), device=q_TNH.device)
    starts = batch.q_starts_R.contiguous()
    req_T = torch.searchsorted(starts, row_T.to(starts.dtype), right=True) - 1
    req_T = req_T.clamp(0, len(batch.kv_lens_R) - 1)
    pages_TP = batch.table_of(spec.index)[batch.req_slots_R[req_T].long()].long()
    k_TLKH, v_TLKH = (x[pages_TP].flatten(1, 2).float() for x in batch.kv.layer(spec.index))
    len_T = batch.kv_lens_R[req_T].long()
    last_T = own_T = len_T - (starts[req_T + 1] - row_T)
    if (ends_T := batch.ends(spec)) is not None:
        last_T = torch.maximum(own_T, ends_T[start : start + len(q_TNH)] - 1)
    seen_TL = _seen(spec, len_T, own_T, last_T, k_TLKH.shape[1])
    q_TKGH = q_TNH.float().unflatten(1, (spec.num_kv_heads, -1))
    score = torch.einsum("tkgh,tlkh->tkgl", q_TKGH, k_TLKH) * spec.scale
    if spec.softcap:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    score = score.masked_fill(~seen_TL[:, None, None], float("-inf"))
    weight = torch.softmax(_with_sinks(score, spec), -1)[..., : score.shape[-1]]
    weight = torch.where(seen_TL[:, None, None], weight, 0.0)  # NaN where no token is visible
    v_TLKH = torch.where(seen_TL[..., None, None], v_TLKH, 0.0)  # unwritten pages may hold anything
    return torch.einsum("tkgl,tlkh->tkgh", weight, v_TLKH).flatten(1, 2).to(q_TNH.dtype)


def _seen(
    spec: AttentionLayer,
    len_T: torch.Tensor,
    own_T: torch.Tensor,
    last_T: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Attention mask (T, L): row at position `own` of a request of `len` tokens, up to `last`."""
    position = torch.arange(longest, device=len_T.device)
    seen = position < len_T[:, None]
    if spec.causal:
        seen = seen & (position <= last_T[:, None])
    if spec.window is not None:
        seen = seen & (position > own_T[:, None] - spec.window)
    return seen


def _with_sinks(score_TKGL: torch.Tensor, spec: AttentionLayer) -> torch.Tensor:
    if spec.sinks is None:
        return score_TKGL
    sinks = spec.sinks.float().view(1, spec.num_kv_heads, -1, 1)
    return torch.cat((score_TKGL, sinks.expand(len(score_TKGL), -1, -1, -1)), -1)


BACKEND = DenseAttention
