"""Cross-attention of decoder rows to an encoded item: audio (Whisper) or a text (BART, T5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sylvan.runtime.core.forward import CrossSpan, ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Split


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossShape:
    """Sizes and switches of cross-attention.

    Attributes:
        dim: Columns of rows and vectors.
        num_heads: Number of heads of queries, keys and values.
        head_dim: Columns of a head.
        bias: Whether the projections have biases.
        key_bias: Whether the projection of keys has one, too.
        scale: Factor of the scores; None: 1 / sqrt(head_dim).
    """

    dim: int
    num_heads: int
    head_dim: int
    bias: bool = True
    key_bias: bool = False
    scale: float | None = None


class CrossAttention(nn.Module):
    """Every row attends to all vectors of its request's only item, or to nothing without one.

    Step programs call it as a PyTorch module. It passes PyTorch each row as a separate sequence, so
    results depend neither on the batch nor on the chunks of a prompt. Ranks share the heads.

    Args:
        build: Build options.
        layer: Index among the layers.
        shape: Sizes and switches.

    Raises:
        ConfigError: the heads do not divide by the number of ranks.
    """

    def __init__(self, build: Build, layer: int, shape: CrossShape) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape
        heads = build.mesh.query_heads(shape.num_heads)
        self._heads = heads.size, shape.head_dim
        self._ranks = build.mesh.sharing(heads)
        dim, columns = shape.dim, heads.times(shape.head_dim)
        self.q_proj = ColumnParallel(build, dim, Split(columns), bias=shape.bias)
        self.k_proj = ColumnParallel(build, dim, Split(columns), bias=shape.key_bias)
        self.v_proj = ColumnParallel(build, dim, Split(columns), bias=shape.bias)
        self.out_proj = RowParallel(build, columns, dim, bias=shape.bias)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        spans = batch.memories
        q_TNH = self.q_proj(x_TD).unflatten(-1, self._heads)
        return self.out_proj(self.attend(q_TNH, spans).flatten(1))

    def attend(self, q_TNH: torch.Tensor, spans: Sequence[CrossSpan]) -> torch.Tensor:
        """Attend to the items of rows; an executor may replace this method."""
        out_TNH = torch.zeros_like(q_TNH)
        for span in spans:
            [memory] = span.memories
            if self.layer not in memory.layers:
                memory.layers[self.layer] = self.project(memory.vectors_ND.to(q_TNH))
            if span.recorder is not None and self.layer in span.recorder.heads:
                scale = self.shape.scale or self._heads[1] ** -0.5
                q_NTH = self._whole(q_TNH[span.rows].transpose(0, 1))
                keys_NSH = self._whole(memory.layers[self.layer][0])
                span.recorder.record(self.layer, q_NTH.transpose(0, 1), keys_NSH, scale)
            q_TN1H = q_TNH[span.rows][:, :, None]
            k_TNSH, v_TNSH = (x.expand(len(q_TN1H), *x.shape) for x in memory.layers[self.layer])
            out_TN1H = functional.scaled_dot_product_attention(
                q_TN1H, k_TNSH, v_TNSH, scale=self.shape.scale
            )
            out_TNH[span.rows] = out_TN1H[:, :, 0]
        return out_TNH

    def project(self, vectors_SD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of an item. Shape: (N, S, H) each."""
        keys = self.k_proj(vectors_SD).unflatten(-1, self._heads).transpose(0, 1)
        return keys, self.v_proj(vectors_SD).unflatten(-1, self._heads).transpose(0, 1)

    def _whole(self, heads: torch.Tensor) -> torch.Tensor:
        """The heads of all ranks, which are the first dimension."""
        return self._ranks.all_gather(heads.contiguous()).flatten(0, 1)
