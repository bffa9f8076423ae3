"""Cross-attention to vectors outside the text, such as an audio encoding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear


class CrossAttention(nn.Module):
    """Every row attends to all vectors of its request's only item, or to nothing without one.

    Step programs call it through PyTorch, request by request, so that rows do not depend on the
    batch.

    Args:
        build: Build options.
        layer: Index among the layers.
        dim: Columns of rows and vectors.
        num_heads: Number of heads of queries, keys and values.
        head_dim: Columns of a head.

    Raises:
        ConfigError: there is more than one rank.
    """

    def __init__(
        self, build: Build, layer: int, *, dim: int, num_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        if build.mesh.tp.size > 1:
            raise ConfigError("attention to an encoder's vectors cannot be divided among ranks")
        self._layer, self._heads = layer, (num_heads, head_dim)
        width = num_heads * head_dim
        self.q_proj = Linear(build, dim, (width,), bias=True)
        self.k_proj = Linear(build, dim, (width,), bias=False)
        self.v_proj = Linear(build, dim, (width,), bias=True)
        self.out_proj = Linear(build, width, (dim,), bias=True)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        spans = batch.memories
        q_TNH = self.q_proj(x_TD).unflatten(-1, self._heads)
        out_TNH = torch.zeros_like(q_TNH)
        for span in spans:
            [memory] = span.memories
            if self._layer not in memory.layers:
                vectors_ND = memory.vectors_ND.to(x_TD)
                memory.layers[self._layer] = (
                    self.k_proj(vectors_ND).unflatten(-1, self._heads).transpose(0, 1),
                    self.v_proj(vectors_ND).unflatten(-1, self._heads).transpose(0, 1),
                )
            k_NSH, v_NSH = memory.layers[self._layer]
            q_NTH = q_TNH[span.rows].transpose(0, 1)
            out = functional.scaled_dot_product_attention(q_NTH[None], k_NSH[None], v_NSH[None])
            out_TNH[span.rows] = out[0].transpose(0, 1)
        return self.out_proj(out_TNH.flatten(1))
