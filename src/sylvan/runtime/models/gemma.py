"""Gemma 1, 2 and 3 (text), VaultGemma: scaled embeddings, norms with 1 + weight.

Gemma 2 adds post-norms and caps scores and logits. Gemma 3 has head norms, and another rotary base
in window layers. VaultGemma is Gemma 2 without the norms after attention and mlp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, sliding_windows
from sylvan.runtime.models.decoder import FUSED, Decoder, PreNorm, Ropes, Sandwich
from sylvan.runtime.models.rope import parse_rope
from sylvan.runtime.models.text_parts import text_part


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any Gemma served here."""
    raw = text_part(raw)
    fields = common_fields(raw)
    first = fields["architecture"] == "GemmaForCausalLM"
    bias = bool(raw.get("attention_bias", False))
    fields |= {
        "embed_scale": float(raw.get("hidden_size") or 1) ** 0.5,
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "hidden_act": "gelu_tanh" if first else fields["hidden_act"],
    }
    return make_config(fields if first else fields | _newer(raw, fields))


def _newer(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    third = fields["architecture"].startswith("Gemma3")
    every = raw.get("sliding_window_pattern") or (6 if third else 2)
    layers = range(raw.get("num_hidden_layers") or 0)
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
    found = {
        "attention_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping") or 0.0,
        "logit_softcap": raw.get("final_logit_softcapping") or 0.0,
        "layer_windows": sliding_windows(
            raw | {"layer_types": raw.get("layer_types") or default}, default_on=True
        ),
    }
    if third:
        found |= {"qk_norm": "head", "local_rope": _local_rope(raw, fields)}
    return found


def _local_rope(raw: dict[str, Any], fields: dict[str, Any]) -> Any:
    parameters = raw.get("rope_parameters") or {}
    base = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    local = parameters.get("sliding_attention") or base
    return parse_rope({"rope_parameters": local}, fields["max_position_embeddings"])


class Gemma(Decoder):
    """The first has the blocks of Llama."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        first = config.architecture == "GemmaForCausalLM"
        return (PreNorm if first else Sandwich)(config, build, layer, ropes)


class VaultGemma(Decoder):
    """The blocks of Llama, under the name of Gemma 2's third norm."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
    }


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    vault = config.architecture == "VaultGemmaForCausalLM"
    return (VaultGemma if vault else Gemma)(config, build)


MODEL = _model
