"""Attention that computes nothing, to measure the cost of everything else."""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class NullAttention:
    """Stores nothing and returns zeros, so generated text is meaningless."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "rocm", "xpu"}),
        batch_invariant=True,
        graph_capture=True,
        runners=frozenset({"eager", "graph"}),
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        return q_TNH.new_zeros(len(q_TNH), spec.num_heads, spec.value_dim)


BACKEND = NullAttention
