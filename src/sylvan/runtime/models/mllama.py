"""Llama 3.2 Vision: Llama with additional cross-attention layers for images.

A row attends to the images directly before it, up to the preceding text. Rows before the first
image, and rows of prompts without images, skip these layers, as in the published code; transformers
lets them attend to all images.

Shapes: T rows, D hidden, N vectors of all images of a row, H columns of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from sylvan.kernels import ops
from sylvan.kernels.api import HeadNorm, X
from sylvan.kernels.paged.reference import head_norm
from sylvan.runtime.core.forward import CrossMemory, ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import VocabEmbedding
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.models.config import ModelConfig, ModelMedia, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Decoder, PreNorm, Ropes, make_mlp, make_norm
from sylvan.runtime.models.multimodal import placeholders
from sylvan.runtime.models.text_parts import text_part

_EXTRA_ROWS = 8  # additional embeddings, for tokens that are never generated
_CROSS = (3, 8, 13, 18, 23, 28, 33, 38)


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json."""
    text = text_part(raw)
    layers = range(text.get("num_hidden_layers") or 0)
    found = text.get("cross_attention_layers")
    cross = _CROSS if found is None else tuple(found)
    media = ModelMedia(
        architecture=text["architectures"][0], token_ids=placeholders(raw), cross=True
    )
    fields = {
        "attention_layers": tuple(layer for layer in layers if layer not in cross),
        "extra_rows": _EXTRA_ROWS,
        "media": media,
    }
    return make_config(common_fields(text) | fields)


class NormedHeads(nn.Module):
    """RMSNorm of each head."""

    def __init__(self, build: Build, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = build.empty(dim), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., H)."""
        return head_norm(x.float(), HeadNorm(self.weight, self._eps)).to(x.dtype)


class ImageAttention(nn.Module):
    """Attention of rows to images: heads are normed, and there are no positions."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self._layer, self._dim, dim = layer, config.head_dim, config.hidden_size
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (share.times(config.head_dim) for share in heads)
        self.q_proj = ColumnParallel(build, dim, Split(queries))
        self.k_proj = ColumnParallel(build, dim, Split(keys))
        self.v_proj = ColumnParallel(build, dim, Split(keys))
        self.o_proj = RowParallel(build, queries, dim)
        self.q_norm = NormedHeads(build, config.head_dim, config.rms_norm_eps)
        self.k_norm = NormedHeads(build, config.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, images: tuple[CrossMemory, ...]) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        q_NTH = self.q_norm(self._heads(self.q_proj(x_TD)))
        pairs = [self._seen(image, x_TD) for image in images]
        k_KNH, v_KNH = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        out = functional.scaled_dot_product_attention(
            q_NTH[None], k_KNH[None], v_KNH[None], enable_gqa=True
        )
        return self.o_proj(out[0].transpose(0, 1).flatten(1))

    def _seen(self, image: CrossMemory, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of an image, computed once."""
        if self._layer not in image.layers:
            vectors_ND = image.vectors_ND.to(like)
            image.layers[self._layer] = (
                self.k_norm(self._heads(self.k_proj(vectors_ND))),
                self._heads(self.v_proj(vectors_ND)),
            )
        return image.layers[self._layer]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, heads x H) to (heads, rows, H)."""
        return x.unflatten(-1, (-1, self._dim)).transpose(0, 1)


class TanhGate(nn.Module):
    """Multiplies by tanh of a learned number."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: any, unchanged."""
        return x * self.weight.tanh()


class ImageLayer(nn.Module):
    """Cross-attention to images and a feed-forward, both gated."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.cross_attn = ImageAttention(config, build, layer)
        self.cross_attn_attn_gate = TanhGate(build)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        self.cross_attn_mlp_gate = TanhGate(build)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        spans = batch.memories
        out_TD = torch.zeros_like(x_TD)
        for span in spans:
            x = x_TD[span.rows]
            seen = self.cross_attn(self.input_layernorm(x)[0], span.memories)
            seen = self.cross_attn_attn_gate(seen)
            h, _ = self.post_attention_layernorm(x + seen)
            out_TD[span.rows] = seen + self.cross_attn_mlp_gate(self.mlp(h))
        return out_TD


class ImageBlock(nn.Module):
    """A cross-attention layer in the stack."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.images = ImageLayer(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X | None]:
        stream_TD = x_TD if residual_TD is None else ops.add(residual_TD, x_TD)
        like = self.images.cross_attn_attn_gate.weight
        return ops.add(stream_TD, self.images(ops.cast(stream_TD, like), batch)), None


class Mllama(Decoder):
    """Llama with cross-attention layers; image placeholders have additional embeddings."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "images": ()}

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.embed_tokens = VocabEmbedding(build, config.table_rows, config.hidden_size)

    def source_name(self, source: str) -> str:
        """Gates are stored as numbers, not as parts of modules."""
        return source.replace("_gate.weight", "_gate")

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        if layer in (config.attention_layers or ()):
            return PreNorm(config, build, layer, ropes)
        return ImageBlock(config, build, layer)


MODEL = Mllama
