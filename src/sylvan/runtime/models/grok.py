"""Grok-1: norms before and after each block, softcapped scores, scaled embeddings and logits.

Source: model.py of xai-org/grok-1; names as in the checkpoint of hpcai-tech.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, MoEConfig, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Decoder, Ropes, Sandwich
from sylvan.runtime.models.moe import sparse_layers

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `Grok1ModelForCausalLM`."""
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 8),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        layers=sparse_layers(raw),
    )
    fields = {
        "moe": moe,
        "hidden_act": "gelu_tanh",
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "embed_scale": raw.get("embedding_multiplier_scale", 1.0),
        "logit_scale": raw.get("output_multiplier_scale", 1.0),
        "attention_scale": raw.get("attn_output_multiplier", 1.0),
        "attention_softcap": float(raw.get("max_attn_value") or 0.0),
    }
    return make_config(common_fields(raw) | fields)


class Grok1(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "self_attn": ("attn",),
        "mlp": ("moe_block",),
        "gate_up_proj": ("linear", "linear_v"),
        "down_proj": ("linear_1",),
        "input_layernorm": ("pre_attn_norm",),
        "post_attention_layernorm": ("post_attn_norm",),
        "pre_feedforward_layernorm": ("pre_moe_norm",),
        "post_feedforward_layernorm": ("post_moe_norm",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Sandwich(config, build, layer, ropes)

    def rename(self, name: str) -> str:
        """The weights of norms are called scales."""
        return super().rename(name).replace("norm.scale", "norm.weight")


MODEL = Grok1
