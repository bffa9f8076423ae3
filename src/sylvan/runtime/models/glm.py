"""GLM-4: half of each head is rotated, in adjacent pairs; version 0414 has more norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Decoder, PreNorm, Ropes, Sandwich


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of `GlmForCausalLM` and `Glm4ForCausalLM`."""
    fields = common_fields({"partial_rotary_factor": 0.5} | raw)
    bias = bool(raw.get("attention_bias", False))
    return make_config(fields | {"qkv_bias": bias, "rope_interleaved": True})


class Glm(Decoder):
    """The checkpoint joins gate and up, but not query, key and value."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"qkv_proj": FUSED["qkv_proj"]}

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return PreNorm(config, build, layer, ropes)


class Glm4(Glm):
    """The checkpoint's names of the four norms."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "post_attention_layernorm": ("post_self_attn_layernorm",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("post_mlp_layernorm",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Sandwich(config, build, layer, ropes)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """The version that the config names."""
    return (Glm4 if config.architecture == "Glm4ForCausalLM" else Glm)(config, build)
