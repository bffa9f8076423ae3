"""Llama 4, text: experts that read scaled inputs, chunks of attention, layers without positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    QueryScaling,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import FUSED, Decoder
from sylvan.runtime.models.moe import experts_are_numbered
from sylvan.runtime.models.text_parts import text_part


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of `Llama4ForCausalLM`."""
    text = text_part(raw)
    layers, inner = range(text.get("num_hidden_layers") or 0), text.get("intermediate_size") or 0
    every, step = text.get("no_rope_layer_interval", 4), text.get("interleave_moe_layer_step", 1)
    rotated_layers = text.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layers]
    nope = tuple(i for i in layers if not rotated_layers[i])
    sparse = text.get("moe_layers")
    moe = MoEConfig(
        num_experts=text.get("num_local_experts", 16),
        top_k=text.get("num_experts_per_tok", 1),
        inner=inner,
        scores="sigmoid",
        scale_inputs=True,
        layers=tuple(layers[step - 1 :: step] if sparse is None else sparse),
        shared=inner,
    )
    bias = bool(text.get("attention_bias", False))
    scaling = QueryScaling(
        every=text.get("floor_scale", 8192),
        strength=text.get("attn_scale", 0.1),
        shift=1,
        layers=nope,
    )
    fields = {
        "moe": moe,
        "intermediate_size": text.get("intermediate_size_mlp") or 16384,
        "rope_interleaved": True,
        "nope_layers": nope,
        "qk_norm": "unit" if text.get("use_qk_norm", True) else "",
        "query_scaling": scaling if nope and text.get("attn_temperature_tuning", True) else None,
        "attention_chunk": text.get("attention_chunk_size", 8192),
        "qkv_bias": bias,
        "o_bias": bias,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
    }
    return make_config(common_fields(text) | fields)


class Llama4(Decoder):
    """The experts are stored as stacks, inputs before outputs."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "mlp": ("feed_forward",),
        "gate": ("router",),
        "shared_experts": ("shared_expert",),
    }
    stacked: ClassVar[bool] = True

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose the matrices."""
        return tensor.transpose(1, 2) if ".experts." in name else tensor


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class by tensor names: GGUF files store experts one by one."""
    return (Decoder if experts_are_numbered(config.raw) else Llama4)(config, build)


MODEL = _model
