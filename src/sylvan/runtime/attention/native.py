"""Attention inside step programs: C++ kernels over pages in their own order.

A program does the work of `run` itself, so this backend only says what it can do.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class NativeAttention:
    """Stands in a program's batch; never asked to attend."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        batch_invariant=True,
        graph_capture=True,
        runners=frozenset({"program"}),
        kv_dtypes=frozenset({"model", "int8"}),
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Programs plan by themselves."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Not offered on tensors."""
        raise NotImplementedError("native attention is part of step programs")


BACKEND = NativeAttention
