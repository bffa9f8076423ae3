"""Encoders (BERT and others): bidirectional attention, and vectors or class scores as output.

BERT and its renamed copies (RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA, ERNIE, Data2Vec),
encoders with rotary positions (NomicBERT, GTE), and ModernBERT, which has pre-norms and limits most
layers to a window.

Shapes: T tokens of all requests, R pooled vectors, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding, VocabEmbedding
from sylvan.runtime.layers.linear import Linear, RowParallel
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Attention, PreNorm, Ropes, make_mlp, make_norm
from sylvan.runtime.models.encoder_config import EncoderKind, kind_of, parse
from sylvan.runtime.models.heads import ClassHead, MaskedLMHead
from sylvan.runtime.models.text_parts import IMAGES, text_name

__all__ = ["MODEL", "Encoder", "parse"]


class PostAdd(nn.Module):
    """x = norm(x + attention(x)), then x = norm(x + mlp(x)), as in the first transformer."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        if config.gated_mlp and config.o_bias:
            sizes = config.intermediate_size, config.hidden_size
            self.mlp.down_proj = RowParallel(build, *sizes, bias=True)
        self.post_feedforward_layernorm = make_norm(config, build)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X | None]:
        x_TD = ops.cast(x_TD, self.post_attention_layernorm.weight)  # of a pipeline stage before
        x_TD, _ = self.post_attention_layernorm(self.self_attn(x_TD, batch), x_TD)
        x_TD, _ = self.post_feedforward_layernorm(self.mlp(x_TD), x_TD)
        return x_TD, None


class FirstPreNorm(nn.Module):
    """The first layer of ModernBERT: its input is already normed."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.post_attention_layernorm(self.self_attn(x_TD, batch), x_TD)
        return self.mlp(h_TD), stream_TD


class Encoder(nn.Module):
    """Embeddings, layers, and a head for classification.

    `fused` maps the modules here to this kind of encoder's checkpoint names.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        self._kind = kind_of(config.architecture)
        self.fused: Mapping[str, tuple[str, ...]] = self._kind.names
        ropes, dim = Ropes(config, build), config.hidden_size
        inner = config.embedding_size or dim
        self.word = VocabEmbedding(build, config.vocab_size, inner)
        self.position = self.token_type = self.project = self.last_norm = self.classes = None
        self.words = None
        if config.learned_positions:
            self.position = Embedding(build, config.max_position_embeddings, inner)
        if config.token_types:
            self.token_type = Embedding(build, config.token_types, inner)
        eps, bias = config.rms_norm_eps, config.norm_bias
        self.embed_norm = LayerNorm(build, inner, eps, bias=bias)
        if inner != dim:
            self.project = Linear(build, inner, (dim,), bias=True)
        self.layers = nn.ModuleList(
            _block(self._kind, layer)(config, build, layer, ropes)
            for layer in range(config.num_hidden_layers)
        )
        if self._kind.pre_norm:
            self.last_norm = make_norm(config, build)
        if config.head == "score":
            self.classes = _head(self._kind, config, build)
        if config.head == "words":
            self.fused = {**self.fused, **self._kind.words, "words": ()}
            tied = config.raw.get("tie_word_embeddings", True)
            table = self.word.weight if tied else None
            act = self._kind.words_act or config.hidden_act
            self.words = MaskedLMHead(config, build, act, inner, table)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of checkpoint tensors that are ignored."""
        unread = self._kind.unused(scores=self.config.head == "score")
        return unread if self.config.media is None else (*unread, *IMAGES)

    def rename(self, name: str) -> str:
        """Remove the parts of a checkpoint's name that differ between its versions."""
        return self._kind.rename(name if self.config.media is None else text_name(name))

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a checkpoint tensor to the layout of its parameter."""
        return self._kind.convert(name, tensor, self.config)

    def embed(self, batch: ForwardBatch) -> X:
        x_TD = self.word(batch.input_ids_T)
        if self.position is not None:
            x_TD = ops.add(x_TD, self.position(batch.positions_T))
        if self.token_type is not None:
            x_TD = ops.add(x_TD, self.token_type(self._types(batch.token_types_T)))
        x_TD, _ = self.embed_norm(x_TD)
        return x_TD if self.project is None else self.project(x_TD)

    def _types(self, types_T: X) -> X:
        """Token types; unknown ones map to the model's last type."""
        if isinstance(types_T, torch.Tensor):
            return types_T.clamp(max=self.config.token_types - 1)
        return types_T  # step programs handle them in the op

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        residual_TD = None
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return x_TD if self.last_norm is None else self.last_norm(x_TD, residual_TD)[0]

    def head(self, hidden_RD: X) -> X:
        """Class scores or word logits of pooled vectors, or the vectors themselves."""
        if self.words is not None:
            return self.words(hidden_RD)
        return hidden_RD if self.classes is None else self.classes(hidden_RD)


def _block(kind: EncoderKind, layer: int) -> type[nn.Module]:
    if not kind.pre_norm:
        return PostAdd
    return PreNorm if layer else FirstPreNorm


def _head(kind: EncoderKind, config: ModelConfig, build: Build) -> ClassHead:
    if not kind.pre_norm:
        return ClassHead(config, build, kind.head_act)
    act = kind.head_activation(config)
    bias = bool(config.raw.get("classifier_bias", False))
    return ClassHead(config, build, act, bias=bias, norm=_head_norm(config, build))


def _head_norm(config: ModelConfig, build: Build) -> LayerNorm:
    return LayerNorm(build, config.hidden_size, config.rms_norm_eps, bias=config.norm_bias)


MODEL = Encoder
