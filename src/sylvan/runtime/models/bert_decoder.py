"""BERT and its relatives with causal attention (`is_decoder`).

BERT, RoBERTa, XLM-R, CamemBERT, Data2Vec, ELECTRA, ERNIE, RemBERT, RoFormer and BertGeneration have
post-norms; Megatron's BERT, XLM-R XL and RoBERTa PreLayerNorm have pre-norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding, VocabEmbedding
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    architecture_of,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder, PreNorm, Ropes
from sylvan.runtime.models.encoder import PostAdd
from sylvan.runtime.models.encoder_config import (
    BERT_LAYERS,
    BERT_WORDS,
    ELECTRA_WORDS,
    ROBERTA_WORDS,
    Names,
)
from sylvan.runtime.models.heads import MaskedLMHead

Raw = dict[str, Any]

_NAMES: Names = {
    **BERT_LAYERS,
    "embed_tokens": BERT_LAYERS["word"],
    "embed_positions": BERT_LAYERS["position"],
}
_REMBERT_HEAD = {
    "project": ("encoder.embedding_hidden_mapping_in",),
    "transform": ("cls.predictions.dense",),
    "transform_norm": ("cls.predictions.LayerNorm",),
    "lm_head": ("cls.predictions.decoder",),
}
_MEGATRON = {
    "input_layernorm": ("attention.ln",),
    "post_attention_layernorm": ("ln",),
    "norm": ("encoder.ln",),
}
_ROBERTA_PRE = {
    "input_layernorm": ("attention.LayerNorm",),
    "post_attention_layernorm": ("intermediate.LayerNorm",),
    "norm": ("LayerNorm",),
}
_XL = {
    "input_layernorm": ("attention.self_attn_layer_norm",),
    "post_attention_layernorm": ("LayerNorm",),
    "norm": ("encoder.LayerNorm",),
}
_UNUSED = (
    "cls.",
    "lm_head.decoder.",
    "pooler.",
    "embeddings.position_ids",
    "encoder.embed_positions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderKind:
    """Differences between these families.

    Attributes:
        prefix: Start of the backbone's tensors.
        names: Names of norms and head that differ from BERT's.
        offset: Whether positions start after the padding id.
        rotary: Whether positions are rotary.
        embed_norm: Whether embeddings are normed.
        pre_norm: Whether norms precede each part, with a final norm.
        transform: Whether a matrix, an activation and a norm precede the vocabulary matrix.
        head_act: Activation of that transform; None: the model's.
        tied: Whether the head is tied to the embeddings by default.
    """

    prefix: str
    names: Names
    offset: bool = False
    rotary: bool = False
    embed_norm: bool = True
    pre_norm: bool = False
    transform: bool = True
    head_act: ActivationKind | None = None
    tied: bool = True


_ROBERTA = DecoderKind(prefix="roberta.", names=ROBERTA_WORDS, offset=True, head_act="gelu")
KINDS: Mapping[str, DecoderKind] = MappingProxyType(
    {
        "BertLMHeadModel": DecoderKind(prefix="bert.", names=BERT_WORDS),
        "BertGenerationDecoder": DecoderKind(prefix="bert.", names={}, transform=False),
        "CamembertForCausalLM": _ROBERTA,
        "Data2VecTextForCausalLM": DecoderKind(
            prefix="data2vec_text.", names=ROBERTA_WORDS, offset=True, head_act="gelu"
        ),
        "ElectraForCausalLM": DecoderKind(prefix="electra.", names=ELECTRA_WORDS, head_act="gelu"),
        "ErnieForCausalLM": DecoderKind(prefix="ernie.", names=BERT_WORDS),
        "MegatronBertForCausalLM": DecoderKind(
            prefix="bert.", names=BERT_WORDS | _MEGATRON, embed_norm=False, pre_norm=True
        ),
        "RemBertForCausalLM": DecoderKind(prefix="rembert.", names=_REMBERT_HEAD, tied=False),
        "RoFormerForCausalLM": DecoderKind(prefix="roformer.", names=BERT_WORDS, rotary=True),
        "RobertaForCausalLM": _ROBERTA,
        "RobertaPreLayerNormForCausalLM": DecoderKind(
            prefix="roberta_prelayernorm.",
            names=ROBERTA_WORDS | _ROBERTA_PRE,
            offset=True,
            pre_norm=True,
            head_act="gelu",
        ),
        "XLMRobertaForCausalLM": _ROBERTA,
        "XLMRobertaXLForCausalLM": DecoderKind(
            prefix="roberta.",
            names=ROBERTA_WORDS | _XL,
            offset=True,
            embed_norm=False,
            pre_norm=True,
            head_act="gelu",
        ),
    }
)


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any of `KINDS`.

    Raises:
        ConfigError: It is an encoder, has cross-attention, or has an unsupported option.
    """
    kind = KINDS[architecture_of(raw)]
    if not raw.get("is_decoder"):
        raise NotNative("text generation by an encoder (is_decoder is not true)")
    for name in ("add_cross_attention", "use_task_id", "rotary_value"):
        if raw.get(name):
            raise NotNative(f"the option {name}")
    if raw.get("position_embedding_type", "absolute") not in ("absolute", None):
        raise NotNative(f"positions of the kind {raw['position_embedding_type']!r}")
    fields = common_fields({"hidden_act": "gelu"} | raw)
    fields |= {
        "num_key_value_heads": fields["num_attention_heads"],
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-12),
        "learned_positions": not kind.rotary,
        "rope_interleaved": kind.rotary,
        "gated_mlp": False,
        "token_types": int(raw.get("type_vocab_size", 2) or 0) if kind.transform else 0,
        "embedding_size": raw.get("embedding_size") or raw.get("input_embedding_size") or 0,
        "head_bias": True,
        "tie_word_embeddings": kind.tied and bool(raw.get("tie_word_embeddings", True)),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True),
    }
    if kind.offset:
        fields["max_position_embeddings"] -= int(raw.get("pad_token_id") or 0) + 1
    return make_config(fields)


class BertDecoder(Decoder):
    """BERT's embeddings (with segment 0 only), layers and head."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        self._kind = KINDS[config.architecture]
        super().__init__(config, build)
        self.fused = {**_NAMES, **self._kind.names, "words": ()}  # pyright: ignore[reportAttributeAccessIssue]
        dim = config.hidden_size
        inner, eps = config.embedding_size or dim, config.rms_norm_eps
        self.token_type = self.embed_norm = self.project = self.words = None
        if config.token_types:
            self.token_type = Embedding(build, config.token_types, inner)
        if self._kind.embed_norm:
            self.embed_norm = LayerNorm(build, inner, eps)
        if inner != dim or "project" in self._kind.names:
            self._narrow(build, inner)
        if not self._kind.pre_norm:
            del self.norm
        if self._kind.transform:
            out = config.raw.get("output_embedding_size") or inner
            table = self.embed_tokens.weight if config.tie_word_embeddings else None
            act = self._kind.head_act or config.hidden_act
            self.words, self.lm_head = MaskedLMHead(config, build, act, out, table), None

    def _narrow(self, build: Build, inner: int) -> None:
        """Embeddings with another width than the layers."""
        config = self.config
        self.embed_tokens = VocabEmbedding(build, config.vocab_size, inner)
        if self.embed_positions is not None:
            self.embed_positions = Embedding(build, config.max_position_embeddings, inner)
        self.project = Linear(build, inner, (config.hidden_size,), bias=True)

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return (PreNorm if self._kind.pre_norm else PostAdd)(config, build, layer, ropes)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of heads for other tasks, and of duplicates of other tensors."""
        return (*_UNUSED, *self.absent)

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name; old checkpoints say gamma and beta."""
        name = name.removeprefix(self._kind.prefix)
        return name.replace(".gamma", ".weight").replace(".beta", ".bias")

    def source_name(self, source: str) -> str:
        """A head without transform."""
        for name in ("lm_head", "cls.predictions"):
            if source == f"{name}.weight":
                return f"{name}.decoder.weight"
        return source

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Drop the rows of positions up to the padding id."""
        if self._kind.offset and name.endswith("position_embeddings.weight"):
            return tensor[-self.config.max_position_embeddings :]
        return tensor

    def embed(self, batch: ForwardBatch) -> X:
        x_TD = super().embed(batch)
        if self.token_type is not None:
            x_TD = ops.add(x_TD, self.token_type(batch.token_types_T))
        if self.embed_norm is not None:
            x_TD, _ = self.embed_norm(x_TD)
        return x_TD if self.project is None else self.project(x_TD)

    @property
    def has_one_stream(self) -> bool:
        """See `Decoder.has_one_stream`."""
        return True

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        if self._kind.pre_norm:
            return super().forward(x_TD, batch)
        residual_TD = None
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return x_TD

    def head(self, hidden_RD: X) -> X:
        return super().head(hidden_RD) if self.words is None else self.words(hidden_RD)


MODEL = BertDecoder
