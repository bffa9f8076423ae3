"""BLOOM and MPT: distance biases instead of positions (ALiBi, arXiv:2108.12409)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder, ungroup_qkv
from sylvan.runtime.models.gpt2 import FALCON_NAMES

Raw = dict[str, Any]

_MPT_MAX = 8  # `alibi_bias_max`, unless config.json has it


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `BloomForCausalLM` and `MptForCausalLM`."""
    found = _FAMILIES[(raw.get("architectures") or [""])[0]](raw)
    fields = common_fields(raw | found.pop("sizes"))
    heads = fields["num_attention_heads"]
    return make_config(
        fields
        | {
            "norm": "layer",
            "gated_mlp": False,
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "num_key_value_heads": heads,
            "nope_layers": tuple(range(fields["num_hidden_layers"])),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        }
        | found
    )


def _bloom(raw: Raw) -> Raw:
    if raw.get("apply_residual_connection_post_layernorm"):
        raise NotNative("residuals after the norms")
    width, heads = raw.get("hidden_size") or raw.get("n_embed") or 0, raw.get("n_head") or 1
    return {
        "sizes": {
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_hidden_layers": raw.get("n_layer") or 0,
            "intermediate_size": 4 * width,
            "hidden_act": "gelu_new",
        },
        "alibi_slopes": default_slopes(heads),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }


def default_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi slopes of BLOOM and Baichuan, for any number of heads."""
    near = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / near) for i in range(near)]
    slopes += [2.0 ** (-8 * (2 * i + 1) / (2 * near)) for i in range(heads - near)]
    return tuple(slopes)


def _mpt(raw: Raw) -> Raw:
    attention = raw.get("attn_config") or {}
    for switch in ("qk_ln", "prefix_lm"):
        if attention.get(switch):
            raise NotNative(f"its variant of attention ({switch})")
    if not attention.get("alibi", True) or raw.get("logit_scale"):
        raise NotNative("positions other than ALiBi, or scaled logits")
    width, heads = raw.get("d_model") or 0, raw.get("n_heads") or 1
    near = 2 ** math.ceil(math.log2(heads))
    most = attention.get("alibi_bias_max") or _MPT_MAX
    slopes = [2.0 ** (-most * (i + 1) / near) for i in range(near)]
    if near != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return {
        "sizes": {
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_hidden_layers": raw.get("n_layers") or 0,
            "max_position_embeddings": raw.get("max_seq_len"),
            "intermediate_size": int(width * raw.get("expansion_ratio", 4)),
            "hidden_act": "gelu",
        },
        "alibi_slopes": tuple(slopes),
        "norm_bias": False,
        "qkv_limit": float(attention.get("clip_qkv") or 0.0),
        "attention_scale": attention.get("softmax_scale"),
    }


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {"BloomForCausalLM": _bloom, "MptForCausalLM": _mpt}
)


class Bloom(Decoder):
    """A norm of the embeddings; (query, key, value) of each head in turn."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FALCON_NAMES,
        "embed_norm": ("word_embeddings_layernorm",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.embed_norm: nn.Module = LayerNorm(build, config.hidden_size, config.rms_norm_eps)

    def embed(self, batch: ForwardBatch) -> X:
        return self.embed_norm(super().embed(batch))[0]

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of the joined projection."""
        if ".query_key_value." not in name:
            return tensor
        return ungroup_qkv(tensor, self.config.num_attention_heads, self.config.head_dim)


class Mpt(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("wte",),
        "layers": ("blocks",),
        "input_layernorm": ("norm_1",),
        "self_attn": ("attn",),
        "qkv_proj": ("Wqkv",),
        "o_proj": ("out_proj",),
        "post_attention_layernorm": ("norm_2",),
        "mlp": ("ffn",),
        "norm": ("norm_f",),
    }


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    return (Bloom if config.architecture == "BloomForCausalLM" else Mpt)(config, build)


MODEL = _model
