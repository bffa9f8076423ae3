"""Mixtures of experts with sigmoid routing, in Llama blocks with head norms.

MiniMax-M2, Hunyuan 3, K-EXAONE, Flint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    NotNative,
    attention_bias,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Decoder
from sylvan.runtime.models.moe import grouped_experts, sparse_layers

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw) | attention_bias(raw) | {"qk_norm": "head"}
    return make_config(fields | _FAMILIES[fields["architecture"]](raw, fields))


def _minimax(raw: Raw, fields: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts") or raw.get("num_experts") or 256,
        top_k=raw.get("num_experts_per_tok", 8),
        inner=raw.get("intermediate_size") or 0,
        scores="sigmoid",
        normalise=True,
        correction=True,
        layers=sparse_layers(raw),
    )
    rope, rotary_dim = fields["rope"], raw.get("rotary_dim")
    if rotary_dim and rope.partial_rotary_factor == 1.0:
        rope = msgspec.structs.replace(rope, partial_rotary_factor=rotary_dim / fields["head_dim"])
    return {"moe": moe, "qk_norm": "whole", "qkv_bias": False, "o_bias": False, "rope": rope}


def _hunyuan(raw: Raw, fields: Raw) -> Raw:
    if raw.get("mlp_bias"):
        raise NotNative("biases of experts (mlp_bias)")
    scale = {"routed_scaling_factor": raw.get("router_scaling_factor", 2.826)}
    return {"moe": grouped_experts({"num_shared_experts": 1} | raw | scale, first=1)}


def _exaone(raw: Raw, fields: Raw) -> Raw:
    """Full-attention layers have no rotary positions if other layers have a window."""
    layers, every = range(raw.get("num_hidden_layers") or 0), raw.get("sliding_window_pattern")
    if isinstance(every, str):
        kinds = ["full_attention" if every[i % len(every)] == "G" else "" for i in layers]
    else:
        kinds = ["" if (i + 1) % (every or 4) else "full_attention" for i in layers]
    kinds = raw.get("layer_types") or [kind or "sliding_attention" for kind in kinds]
    windows = sliding_windows(raw | {"layer_types": kinds}, default_on=True)
    first = raw.get("first_k_dense_replace", 1)
    experts = {"num_shared_experts": 1, "routed_scaling_factor": 2.5} | raw
    return {
        "moe": grouped_experts(experts, first=first),
        "layer_windows": windows,
        "nope_layers": tuple(i for i, window in enumerate(windows) if window is None),
    }


def _flint(raw: Raw, fields: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    full = (i < 2 or i % 4 == 1 or i == len(layers) - 1 for i in layers)
    kinds = ["full_attention" if everything else "sliding_attention" for everything in full]
    raw = {"layer_types": kinds, "sliding_window": 513, "mlp_only_layers": [0, 1]} | raw
    windows = sliding_windows(raw, default_on=True)
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 256),
        top_k=raw.get("num_experts_per_tok", 6),
        inner=raw.get("moe_intermediate_size") or 0,
        scores="sigmoid",
        normalise=bool(raw.get("norm_topk_prob", True)),
        layers=sparse_layers(raw),
        shared=raw.get("shared_expert_intermediate_size", 1024),
    )
    return {
        "moe": moe,
        "sinks": True,
        "layer_windows": windows,
        "nope_layers": tuple(i for i, window in enumerate(windows) if window is None),
    }


_FAMILIES: Mapping[str, Callable[[Raw, Raw], Raw]] = MappingProxyType(
    {
        "MiniMaxM2ForCausalLM": _minimax,
        "HYV3ForCausalLM": _hunyuan,
        "ExaoneMoeForCausalLM": _exaone,
        "FlintForCausalLM": _flint,
    }
)


class MiniMax(Decoder):
    """Mixtral's names, with the selection bias next to the router."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "mlp": ("block_sparse_moe",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }

    def source_name(self, source: str) -> str:
        """Name of the bias in the checkpoint."""
        return source.replace(".gate.e_score", ".e_score")


class Exaone(Decoder):
    """The checkpoint stores the selection bias next to the router."""

    def source_name(self, source: str) -> str:
        """Name of the bias in the checkpoint."""
        return source.replace(".gate.e_score", ".e_score")


class HunyuanSigmoidMoe(Decoder):
    """Names of its own around the experts."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "shared_experts": ("shared_mlp",)}

    def source_name(self, source: str) -> str:
        """Router and bias."""
        source = source.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias")
        return source.replace(".mlp.gate.weight", ".mlp.router.gate.weight")


class Flint(Decoder):
    """One shared expert, and sinks under another name."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "shared_experts": ("shared_expert",)}

    def source_name(self, source: str) -> str:
        """The sinks."""
        return source.replace(".self_attn.sinks", ".self_attn.softmax_offset")


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "MiniMaxM2ForCausalLM": MiniMax,
        "HYV3ForCausalLM": HunyuanSigmoidMoe,
        "ExaoneMoeForCausalLM": Exaone,
        "FlintForCausalLM": Flint,
    }
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    return _MODELS[config.architecture](config, build)


MODEL = _model
