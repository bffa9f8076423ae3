"""Granite's relatives: experts, windows with sinks (SWA), and HyperCLOVA X with more norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from torch import nn

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
from sylvan.runtime.models.decoder import FUSED, Decoder, Ropes, Sandwich
from sylvan.runtime.models.llama import granite_multipliers
from sylvan.runtime.models.mamba import granite_name
from sylvan.runtime.models.moe import experts_are_numbered, sparse_layers

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw) | granite_multipliers(raw) | attention_bias(raw)
    fields["mlp_bias"] = bool(raw.get("mlp_bias", False))
    return make_config(fields | _FAMILIES[fields["architecture"]](raw, fields))


def _experts(raw: Raw, fields: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 8),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        scores="softmax_chosen",
        layers=sparse_layers(raw),
        shared=raw.get("shared_intermediate_size") or 0,
    )
    return {"moe": moe}


def _windows(raw: Raw, fields: Raw) -> Raw:
    """Window of each layer; a rotary base of 0 means no positions."""
    layers = range(raw.get("num_hidden_layers") or 0)
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in layers]
    windows = sliding_windows({"sliding_window": 128, "layer_types": kinds} | raw, default_on=True)
    bases = raw.get("layer_rope_theta") or [fields["rope"].rope_theta for _ in layers]
    found = {base for base in bases if base}
    if len(found) > 1 or len(bases) != len(layers):
        raise NotNative("rotary bases that differ between layers (layer_rope_theta)")
    base = float(next(iter(found), fields["rope"].rope_theta))
    return {
        "sinks": True,
        "layer_windows": windows,
        "nope_layers": tuple(i for i in layers if not bases[i]),
        "rope": msgspec.structs.replace(fields["rope"], rope_theta=base),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _both(raw: Raw, fields: Raw) -> Raw:
    tied = bool(raw.get("tie_word_embeddings", False))
    return _experts(raw, fields) | _windows(raw, fields) | {"tie_word_embeddings": tied}


def _hyperclova(raw: Raw, fields: Raw) -> Raw:
    scale = raw.get("attention_multiplier")
    return {"attention_scale": scale, "logit_scale": raw.get("logits_scaling", 1.0)}


_FAMILIES: Mapping[str, Callable[[Raw, Raw], Raw]] = MappingProxyType(
    {
        "GraniteMoeForCausalLM": _experts,
        "GraniteMoeSharedForCausalLM": _experts,
        "GraniteMoeSWAForCausalLM": _both,
        "GraniteSWAForCausalLM": _windows,
        "HyperCLOVAXForCausalLM": _hyperclova,
    }
)


class GraniteMoe(Decoder):
    """Experts are stored as stacks."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"qkv_proj": FUSED["qkv_proj"]}
    stacked: ClassVar[bool] = True

    def source_name(self, source: str) -> str:
        """Granite's name of a mixture tensor."""
        return granite_name(source)


class GraniteMoeSWA(GraniteMoe):
    """Newer names."""

    def source_name(self, source: str) -> str:
        """Granite's name of a mixture tensor."""
        source = source.replace(".mlp.gate.", ".block_sparse_moe.router.")
        source = source.replace(".mlp.experts.", ".block_sparse_moe.experts.")
        return granite_name(source)


class HyperClova(Decoder):
    """Norms before and after."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "post_attention_layernorm": ("post_norm1",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("post_norm2",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Sandwich(config, build, layer, ropes)


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "GraniteMoeForCausalLM": GraniteMoe,
        "GraniteMoeSharedForCausalLM": GraniteMoe,
        "GraniteMoeSWAForCausalLM": GraniteMoeSWA,
    }
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    hyper = config.architecture == "HyperCLOVAXForCausalLM"
    if hyper and config.raw.get("use_post_norm", True):
        return HyperClova(config, build)
    if experts_are_numbered(config.raw):
        return Decoder(config, build)
    return _MODELS.get(config.architecture, Decoder)(config, build)


MODEL = _model
