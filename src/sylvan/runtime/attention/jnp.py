"""Attention in plain `jax.numpy`, as part of step programs on JAX: for CPUs, and as the reference.

The implementation is the lowering `sylvan.kernels.xla.attention`; this module imports no JAX.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class JnpAttention:
    """Declares what the lowering supports; step programs attend by themselves."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"jax", "tpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        row_ends=True,
        runners=frozenset({"program"}),
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: step programs plan by themselves."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Not supported on tensors."""
        raise NotImplementedError("attention on JAX is part of step programs")


BACKEND = JnpAttention
