"""Llama, and those that are Llama with a switch in their config.

Mistral (windows), Qwen2 (bias), Qwen3 (head norm), Granite and MiniCPM (multipliers), SmolLM3
(layers without positions), Seed-OSS (bias), Helium (interleaved rotary positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, sliding_windows
from sylvan.runtime.models.decoder import Decoder

Switches = dict[str, Any]


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw)
    bias = bool(raw.get("attention_bias", False))
    common = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}
    return make_config(fields | common | _FAMILIES.get(fields["architecture"], _llama)(raw))


def _llama(raw: dict[str, Any]) -> Switches:
    return {"layer_windows": sliding_windows(raw, default_on=False)}


def _mistral(raw: dict[str, Any]) -> Switches:
    return {"layer_windows": sliding_windows(raw, default_on=True)}


def _qwen2(raw: dict[str, Any]) -> Switches:
    return _llama(raw) | {"qkv_bias": bool(raw.get("attention_bias", True)), "o_bias": False}


def _qwen3(raw: dict[str, Any]) -> Switches:
    return _llama(raw) | {"qk_norm": "head"}


def _granite(raw: dict[str, Any]) -> Switches:
    return {
        "embed_scale": raw.get("embedding_multiplier", 1.0),
        "logit_scale": 1.0 / (raw.get("logits_scaling") or 1.0),
        "residual_scale": raw.get("residual_multiplier", 1.0),
        "attention_scale": raw.get("attention_multiplier", 1.0),
    }


def _minicpm(raw: dict[str, Any]) -> Switches:
    depth = raw.get("scale_depth", 1.0) / math.sqrt(raw.get("num_hidden_layers") or 1)
    return {
        "embed_scale": raw.get("scale_emb", 1.0),
        "residual_scale": depth,
        "logit_scale": raw.get("dim_model_base", 256) / (raw.get("hidden_size") or 1),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _smollm3(raw: dict[str, Any]) -> Switches:
    every, layers = raw.get("no_rope_layer_interval", 4), range(raw.get("num_hidden_layers") or 0)
    marks = raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layers]
    nope = tuple(i for i in layers if not marks[i])
    return _llama(raw) | {
        "nope_layers": nope,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _seed_oss(raw: dict[str, Any]) -> Switches:
    return {"o_bias": bool(raw.get("attention_out_bias", False))}


def _helium(raw: dict[str, Any]) -> Switches:
    return {"rope_interleaved": True, "o_bias": False}


_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Switches]] = MappingProxyType(
    {
        "MistralForCausalLM": _mistral,
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "GraniteForCausalLM": _granite,
        "MiniCPMForCausalLM": _minicpm,
        "SmolLM3ForCausalLM": _smollm3,
        "SeedOssForCausalLM": _seed_oss,
        "HeliumForCausalLM": _helium,
    }
)

MODEL = Decoder
LlamaForCausalLM = Decoder
