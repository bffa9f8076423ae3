"""Attention in plain `jax.numpy`, as part of step programs on JAX: for CPUs, and as the reference.

Nothing here imports JAX: the program has its own lowering (`sylvan.kernels.xla.attention`).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class JnpAttention:
    """A placeholder in a program's batch: declares capabilities only, and never attends."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"jax", "tpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        row_ends=True,
        runners=frozenset({"program"}),
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
        raise NotImplementedError("attention on JAX is part of step programs")


BACKEND = JnpAttention
