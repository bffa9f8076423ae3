"""Kinds of encoders: their config.json, and the names in their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from sylvan.kernels.api import ActivationKind
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import (
    ACTIVATIONS,
    ModelConfig,
    NotNative,
    architecture_of,
    common_fields,
    make_config,
)
from sylvan.runtime.models.heads import count_labels
from sylvan.runtime.models.rope import parse_rope

Names = Mapping[str, tuple[str, ...]]

_SCORES = "ForSequenceClassification"
_SUFFIXES = (_SCORES, "ForMaskedLM", "ForPreTraining", "Model")

_EMBEDDINGS = {
    "word": ("embeddings.word_embeddings",),
    "position": ("embeddings.position_embeddings",),
    "token_type": ("embeddings.token_type_embeddings",),
    "embed_norm": ("embeddings.LayerNorm",),
    "project": ("embeddings_project",),
}
_BERT = _EMBEDDINGS | {
    "layers": ("encoder.layer",),
    "self_attn": (),
    "mlp": (),
    "qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "o_proj": ("attention.output.dense",),
    "post_attention_layernorm": ("attention.output.LayerNorm",),
    "up_proj": ("intermediate.dense",),
    "down_proj": ("output.dense",),
    "post_feedforward_layernorm": ("output.LayerNorm",),
    "classes": (),
}
BERT_LAYERS: Names = _BERT
"""BERT's names of embeddings and layers."""
BERT_WORDS = {
    "transform": ("cls.predictions.transform.dense",),
    "transform_norm": ("cls.predictions.transform.LayerNorm",),
    "lm_head": ("cls.predictions",),
}
"""BERT's masked-LM head; its matrix is the embedding table."""
ROBERTA_WORDS = {"transform": ("lm_head.dense",), "transform_norm": ("lm_head.layer_norm",)}
ELECTRA_WORDS = {
    "transform": ("generator_predictions.dense",),
    "transform_norm": ("generator_predictions.LayerNorm",),
    "lm_head": ("generator_lm_head",),
}
_DISTIL_WORDS = {
    "transform": ("vocab_transform",),
    "transform_norm": ("vocab_layer_norm",),
    "lm_head": ("vocab_projector",),
}
_POOLER = {"dense": ("pooler.dense",), "out": ("classifier",)}
_CLASSIFIER = {"dense": ("classifier.dense",), "out": ("classifier.out_proj",)}
_DISTIL = _BERT | {
    "layers": ("transformer.layer",),
    "qkv_proj": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "o_proj": ("attention.out_lin",),
    "post_attention_layernorm": ("sa_layer_norm",),
    "up_proj": ("ffn.lin1",),
    "down_proj": ("ffn.lin2",),
    "post_feedforward_layernorm": ("output_layer_norm",),
    "dense": ("pre_classifier",),
    "out": ("classifier",),
}
_MODERN: Names = {
    "word": ("embeddings.tok_embeddings",),
    "embed_norm": ("embeddings.norm",),
    "input_layernorm": ("attn_norm",),
    "self_attn": ("attn",),
    "qkv_proj": ("Wqkv",),
    "o_proj": ("Wo",),
    "post_attention_layernorm": ("mlp_norm",),
    "gate_up_proj": ("Wi",),
    "down_proj": ("Wo",),
    "classes": (),
    "dense": ("head.dense",),
    "norm": ("head.norm",),
    "last_norm": ("final_norm",),
    "out": ("classifier",),
}
_NOMIC = (
    _EMBEDDINGS
    | {
        "embed_norm": ("emb_ln",),
        "layers": ("encoder.layers",),
        "self_attn": ("attn",),
        "qkv_proj": ("Wqkv",),
        "o_proj": ("out_proj",),
        "post_attention_layernorm": ("norm1",),
        "gate_up_proj": ("fc12", "fc11"),
        "down_proj": ("fc2",),
        "post_feedforward_layernorm": ("norm2",),
        "classes": (),
    }
    | _POOLER
)
_GTE = (
    _EMBEDDINGS
    | {
        "layers": ("encoder.layer",),
        "self_attn": ("attention",),
        "qkv_proj": ("qkv_proj",),
        "post_attention_layernorm": ("attn_ln",),
        "gate_up_proj": ("up_gate_proj",),
        "post_feedforward_layernorm": ("mlp_ln",),
        "classes": (),
    }
    | _POOLER
)
_HEADS = (
    "cls.",
    "linear.",
    "lm_head.",
    "decoder.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "generator_",
    "discriminator_predictions.",
    "embeddings.position_ids",
)
_CLASSES = ("pooler.", "classifier.", "pre_classifier.", "head.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderKind:
    """A kind of encoder.

    Attributes:
        prefix: Prefix of the backbone's tensors in checkpoints with a head.
        names: See `Encoder.fused`.
        head_act: Activation between the two matrices of a classification head.
        offset: Whether positions start after the padding id.
        pre_norm: Whether norms precede each part, and most layers have a window.
        rotary: Whether positions are rotary instead of learned.
        gated: Whether the feed-forward has a gate.
        bias: Whether linear layers have biases; in a gated feed-forward only the last one.
        sizes: config.json's names of sizes that differ from BERT's.
        words: Names of the masked-LM head; empty if unsupported.
        words_act: Activation of that head; "" for the model's.
    """

    prefix: tuple[str, ...]
    names: Names
    head_act: ActivationKind = "tanh"
    offset: bool = False
    pre_norm: bool = False
    rotary: bool = False
    gated: bool = False
    bias: bool = True
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    words: Names = field(default_factory=dict[str, tuple[str, ...]])
    words_act: ActivationKind | None = None

    def rename(self, name: str) -> str:
        """Some old checkpoints call a norm's parameters gamma and beta."""
        for start in self.prefix:
            name = name.removeprefix(start)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def unused(self, *, scores: bool) -> tuple[str, ...]:
        if not scores:
            return (*_HEADS, *_CLASSES)
        used = {parts[0] for key in ("dense", "out") if (parts := self.names[key])}
        return (*_HEADS, *(n for n in _CLASSES if not any(u.startswith(n) for u in used)))

    def convert(self, name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        if self.offset and name.endswith("position_embeddings.weight"):
            return tensor[-config.max_position_embeddings :]
        if name.endswith("up_gate_proj.weight"):
            return torch.cat(tensor.chunk(2)[::-1])
        return tensor

    def head_activation(self, config: ModelConfig) -> ActivationKind:
        """Activation of a head, by its name in the config."""
        return _activation(config.raw.get("classifier_activation", "gelu"))


_ROBERTA = EncoderKind(
    prefix=("roberta.",),
    names=_BERT | _CLASSIFIER,
    offset=True,
    words=ROBERTA_WORDS,
    words_act="gelu",
)
KINDS: Mapping[str, EncoderKind] = MappingProxyType(
    {
        "Bert": EncoderKind(prefix=("bert.",), names=_BERT | _POOLER, words=BERT_WORDS),
        "Contriever": EncoderKind(prefix=("bert.",), names=_BERT | _POOLER),
        "Camembert": _ROBERTA,
        "Data2VecText": EncoderKind(
            prefix=("data2vec_text.",), names=_BERT | _CLASSIFIER, offset=True
        ),
        "DistilBert": EncoderKind(
            prefix=("distilbert.",),
            names=_DISTIL,
            head_act="relu",
            words=_DISTIL_WORDS,
            sizes={
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "hidden_act": "activation",
            },
        ),
        "Electra": EncoderKind(prefix=("electra.",), names=_BERT | _CLASSIFIER, head_act="gelu"),
        "Ernie": EncoderKind(prefix=("ernie.",), names=_BERT | _POOLER),
        "Gte": EncoderKind(prefix=("gte.", "new."), names=_GTE, rotary=True, gated=True),
        "ModernBert": EncoderKind(
            prefix=("model.",), names=_MODERN, pre_norm=True, rotary=True, gated=True, bias=False
        ),
        "NomicBert": EncoderKind(
            prefix=("nomic_bert.",), names=_NOMIC, rotary=True, gated=True, bias=False
        ),
        "Roberta": _ROBERTA,
        "XLMRoberta": _ROBERTA,
    }
)
"""Kinds of encoders, by prefix of the architecture's name."""


def kind_of(architecture: str) -> EncoderKind:
    """The kind of an encoder architecture."""
    for suffix in _SUFFIXES:
        if (stem := architecture.removesuffix(suffix)) in KINDS:
            return KINDS[stem]
    raise ConfigError(f"{architecture} is not a supported encoder")


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any encoder served here.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    architecture = architecture_of(raw)
    kind = kind_of(architecture)
    spelt = raw | {ours: raw[theirs] for ours, theirs in kind.sizes.items() if theirs in raw}
    spelt.setdefault("hidden_act", raw.get("hidden_activation") or "gelu")
    _check(raw)
    fields = common_fields(spelt)
    scores = architecture.endswith(_SCORES)
    fields |= {
        "causal": False,
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_eps", raw.get("norm_eps", 1e-12)),
        "learned_positions": not kind.rotary,
        "gated_mlp": kind.gated,
        "token_types": _token_types(raw, kind),
        "embedding_size": raw.get("embedding_size") or 0,
        "head": "score" if scores else "none",
        "num_labels": count_labels(raw) if scores else 0,
        "tie_word_embeddings": False,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), kind.bias),
        "mlp_bias": kind.bias and not kind.gated,
        **(_modern(raw, fields) if kind.pre_norm else {}),
    }
    if kind.offset:
        fields["max_position_embeddings"] -= int(raw.get("pad_token_id") or 0) + 1
    return make_config(fields)


def with_mlm_head(config: ModelConfig) -> ModelConfig:
    """The config extended by the masked-LM head.

    Raises:
        ConfigError: the model has no supported head.
    """
    architecture = config.architecture
    masks = architecture.endswith(("ForMaskedLM", "ForPreTraining"))
    if not masks or not kind_of(architecture).words:
        raise ConfigError(f"pooling splade needs a masked-LM head, which {architecture} lacks")
    return msgspec.structs.replace(config, head="words")


def _check(raw: dict[str, Any]) -> None:
    """Reject options that no encoder here supports."""
    for name, ordinary in (
        ("position_embedding_type", "absolute"),
        ("use_task_id", False),
        ("sinusoidal_pos_embds", False),
        ("is_decoder", False),
    ):
        value = raw.get(name, ordinary)
        rotary = name == "position_embedding_type" and value == "rope"
        if value != ordinary and not rotary:
            raise NotNative(f"{name} {value!r}")


def _token_types(raw: dict[str, Any], kind: EncoderKind) -> int:
    default = 0 if kind.pre_norm or "n_layers" in kind.sizes.values() else 2
    return int(raw.get("type_vocab_size", default) or 0) if default else 0


def _modern(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields for ModernBERT: two of three layers have a window and a rotary base of their own."""
    layers, every = range(raw.get("num_hidden_layers") or 0), _every(raw)
    default = ["sliding_attention" if i % every else "full_attention" for i in layers]
    half = int(raw.get("local_attention", 128)) // 2 + 1
    kinds = raw.get("layer_types") or default
    bias = bool(raw.get("attention_bias", False))
    return {
        "layer_windows": tuple(half if kind == "sliding_attention" else None for kind in kinds),
        "rope": _rope(raw, fields, "full_attention", raw.get("global_rope_theta", 160_000.0)),
        "local_rope": _rope(raw, fields, "sliding_attention", raw.get("local_rope_theta")),
        "norm_bias": bool(raw.get("norm_bias", False)),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _every(raw: dict[str, Any]) -> int:
    every = raw.get("global_attn_every_n_layers", 3)
    if not isinstance(every, int) or every < 1:
        raise ConfigError("config.json: global_attn_every_n_layers must be at least 1")
    return every


def _rope(raw: dict[str, Any], fields: dict[str, Any], layers: str, theta: Any) -> Any:
    found = (raw.get("rope_parameters") or {}).get(layers) or {"rope_theta": theta or 10_000.0}
    return parse_rope({"rope_parameters": found}, fields["max_position_embeddings"])


def _activation(name: str) -> ActivationKind:
    if name not in ACTIVATIONS:
        raise ConfigError(f"config.json: unknown activation {name!r}")
    return ACTIVATIONS[name]
