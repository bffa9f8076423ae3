"""Spark X2.5: Llama with a gate per head, and other rotary positions in window layers.

Source and tensor names: the modelling file in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    attention_bias,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import Attention, Decoder, PreNorm, Ropes
from sylvan.runtime.models.rope import RopeParams, parse_rope
from sylvan.runtime.models.step import HeadGateAttention

Raw = dict[str, Any]

_FULL, _NEAR = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.25},
    _NEAR: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `Spark2_5ForCausalLM`.

    Raises:
        ConfigError: Gates have an activation that no published checkpoint has.
    """
    if raw.get("gate_attn_act_mode", "sigmoid") != "sigmoid":
        raise ConfigError("config.json: gate_attn_act_mode must be 'sigmoid'")
    if raw.get("attention_bias") and raw.get("headwise_attn_output_gate", True):
        raise ConfigError("config.json: attention_bias must be false with gated attention")
    layers = raw.get("num_hidden_layers") or 0
    kinds = raw.get("layer_types") or [_NEAR if (i + 1) % 4 else _FULL for i in range(layers)]
    sizes = {
        "hidden_act": raw.get("hidden_act", "gelu"),
        "layer_types": kinds[:layers],
        "rope_parameters": None,
        "head_dim": raw.get("head_dim", 256),
    }
    fields = {
        "raw": raw,
        "rope": _rope(raw, _FULL),
        "local_rope": _rope(raw, _NEAR),
        "layer_windows": sliding_windows({"sliding_window": 512} | raw | sizes, default_on=True),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }
    return make_config(common_fields(raw | sizes) | attention_bias(raw) | fields)


def _rope(raw: Raw, kind: str) -> RopeParams:
    given = raw.get("rope_parameters") or {}
    found = _ROPES[kind] | (given.get(kind) or {}) if isinstance(given, dict) else given
    positions = raw.get("max_position_embeddings")
    return parse_rope({"rope_parameters": found}, positions if isinstance(positions, int) else 1)


class SparkBlock(PreNorm):
    """As Llama's."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        gated = config.raw.get("headwise_attn_output_gate", True)
        self.self_attn = (HeadGateAttention if gated else Attention)(config, build, layer, ropes)


class Spark(Decoder):
    """Maps tensor names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("embedding",),
        "qkv_proj": ("q_k_v_proj",),
        "o_proj": ("out_proj",),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return SparkBlock(config, build, layer, ropes)


MODEL = Spark
