"""Reference attention in plain PyTorch, on any device: all other backends are tested against it."""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.kernels.paged import reference
from sylvan.runtime.attention.api import (
    AttentionCaps,
    AttentionLayer,
    ForwardBatch,
    ends_of,
    first_seen,
)
from sylvan.runtime.core.step import DraftRows, ancestors


class ReferenceAttention:
    """Per request: gather its pages, then softmax attention in float32."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "rocm", "xpu"}),
        kv_dtypes=frozenset({"model", "fp8_e4m3", "fp8_e5m2"}),
        tree_mask=True,
        row_ends=True,
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: layers share no work."""

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
        starts, lens = batch.q_starts_R.tolist(), batch.kv_lens_R.tolist()
        drafts = {draft.index: draft for draft in batch.drafts if not draft.is_chain}
        table_SP, size = batch.table_of(spec.index), batch.kv.page_size
        for r, row in enumerate(batch.req_slots_R.tolist()):
            own = slice(starts[r], starts[r + 1])
            first = first_seen(spec, lens[r] - (starts[r + 1] - starts[r])) // size
            pages = table_SP[row, first : -(-lens[r] // size)].long()
            k_SKH, v_SKH = (
                x[pages].flatten(0, 1)[: lens[r] - first * size].to(q_TNH.dtype)
                for x in (keys, values)
            )
            if r in drafts:
                out = _attend_tree(q_TNH[own], k_SKH, v_SKH, spec, drafts[r])
            else:
                ends = ends_of(batch, spec, own, first * size)
                out = reference.attend(q_TNH[own], k_SKH, v_SKH, spec, ends_T=ends)
            out_TNH[own] = out.unflatten(1, (spec.num_heads, spec.value_dim))
        return out_TNH


def _attend_tree(
    q_TNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    spec: AttentionLayer,
    draft: DraftRows,
) -> torch.Tensor:
    """Attend for a draft tree: a draft token sees the known tokens, its ancestors, and itself."""
    count = len(draft.parents)
    known = len(k_SKH) - count
    first = len(q_TNH) - count
    out = [reference.attend(q_TNH[:first], k_SKH[:known], v_SKH[:known], spec)]
    for node in range(count):
        path = [known + i for i in ancestors(draft.parents, node)]
        seen = torch.tensor([*range(known), *path], device=k_SKH.device)
        row = slice(first + node, first + node + 1)
        out.append(reference.attend(q_TNH[row], k_SKH[seen], v_SKH[seen], spec))
    return torch.cat(out)


BACKEND = ReferenceAttention
