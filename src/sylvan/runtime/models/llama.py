"""Llama, and families that differ from it only by switches in their config.

Mistral (windows), Qwen2 (bias), Qwen3 (head norm), SDAR and Dream (diffusion), Granite and MiniCPM
(multipliers), SmolLM3 (layers without positions), Seed-OSS (bias), Helium and ERNIE 4.5
(interleaved rotary positions), OLMo (norms without weights), Ministral 3 (scaled queries), Hunyuan
(head norms after rotation), MiMo (bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    QueryScaling,
    architecture_of,
    block_diffusion,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Decoder
from sylvan.runtime.models.rope import RopeParams

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


def _sdar(raw: dict[str, Any]) -> Switches:
    return _qwen3(raw) | block_diffusion(raw, block=4, mask_id=151669)


def _dream(raw: dict[str, Any]) -> Switches:
    how = {"whole": True, "shifted": True, "last_time": 1e-3}
    return _qwen2(raw) | block_diffusion(raw, block=512, mask_id=151666, **how)


def granite_multipliers(raw: dict[str, Any]) -> Switches:
    """Granite's multipliers of embeddings, scores, residuals and logits."""
    return {
        "embed_scale": raw.get("embedding_multiplier", 1.0),
        "logit_scale": 1.0 / (raw.get("logits_scaling") or 1.0),
        "residual_scale": raw.get("residual_multiplier", 1.0),
        "attention_scale": raw.get("attention_multiplier", 1.0),
    }


def minicpm_multipliers(raw: dict[str, Any]) -> Switches:
    """MiniCPM's multipliers of embeddings, residuals and logits."""
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


def _ernie(raw: dict[str, Any]) -> Switches:
    bias = bool(raw.get("use_bias", False))
    return {
        "rope_interleaved": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _olmo(raw: dict[str, Any]) -> Switches:
    limit = float(raw.get("clip_qkv") or 0.0)
    return {"norm": "layer", "norm_weight": False, "rms_norm_eps": 1e-5, "qkv_limit": limit}


def query_scaling(raw: dict[str, Any]) -> QueryScaling | None:
    """Scaling of queries at late positions (`llama_4_scaling_beta`); None: none."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    beta, first = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScaling(every=first, strength=beta) if beta and first else None


def _ministral3(raw: dict[str, Any]) -> Switches:
    return _mistral(raw) | {"query_scaling": query_scaling(raw)}


def _hunyuan(raw: dict[str, Any]) -> Switches:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    found = {"qk_norm": "head" if raw.get("use_qk_norm", True) else "", "qk_norm_last": True}
    return found | ({"rope": _stretched(raw, rope)} if rope.get("alpha") else {})


def _stretched(raw: dict[str, Any], rope: dict[str, Any]) -> RopeParams:
    """Hunyuan's base that grows with the length, fixed by `alpha`."""
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    base = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return RopeParams(rope_theta=base * rope["alpha"] ** (head / (head - 2)))


_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Switches]] = MappingProxyType(
    {
        "MistralForCausalLM": _mistral,
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "GraniteForCausalLM": granite_multipliers,
        "DreamModel": _dream,
        "SDARForCausalLM": _sdar,
        "MiniCPMForCausalLM": minicpm_multipliers,
        "SmolLM3ForCausalLM": _smollm3,
        "SeedOssForCausalLM": _seed_oss,
        "HeliumForCausalLM": _helium,
        "Ernie4_5ForCausalLM": _ernie,
        "MiMoForCausalLM": _qwen2,
        "OlmoForCausalLM": _olmo,
        "Ministral3ForCausalLM": _ministral3,
        "HunYuanDenseV1ForCausalLM": _hunyuan,
    }
)

LlamaForCausalLM = Decoder


class Hunyuan(Decoder):
    """Maps the names of head norms."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "q_norm": ("query_layernorm",),
        "k_norm": ("key_layernorm",),
    }


class Classifier(Decoder):
    """Another name of the head (`LlamaForClassification`)."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "score": ("classification_head",)}


class WeightedReward(Decoder):
    """Names of a weighted reward head (`LlamaForSequenceClassificationWithNormal_Weights`)."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "score": (),
        "rewards": ("score",),
        "weights": ("weights.fc",),
    }


_NAMES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "HunYuanDenseV1ForCausalLM": Hunyuan,
        "LlamaForClassification": Classifier,
        "LlamaForSequenceClassificationWithNormal_Weights": WeightedReward,
    }
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    generates = config.head in ("lm", "none")
    name = config.architecture if generates else architecture_of(config.raw)
    return _NAMES.get(name, Decoder)(config, build)


MODEL = _model
