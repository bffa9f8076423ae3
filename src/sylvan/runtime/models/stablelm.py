"""Gated or plain decoders with layer norms: StableLM, Starcoder 2, Nemotron, Arcee, Jais 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Decoder, Parallel, PreNorm, Ropes


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw)
    return make_config(fields | _FAMILIES[fields["architecture"]](raw))


def _stablelm(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("qk_layernorm"):
        raise NotNative("layer norms of heads (qk_layernorm)")
    return {
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
        "qkv_bias": bool(raw.get("use_qkv_bias", False)),
    }


def _starcoder2(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("use_bias", True))
    return {
        "norm": "layer",
        "rms_norm_eps": raw.get("norm_epsilon", 1e-5),
        "gated_mlp": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "layer_windows": sliding_windows(raw, default_on=True),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }


def _nemotron(raw: dict[str, Any]) -> dict[str, Any]:
    return _arcee(raw) | {"norm": "layer", "rms_norm_eps": raw.get("norm_eps", 1e-5)}


def _arcee(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    mlp_bias = bool(raw.get("mlp_bias", False))
    return {"gated_mlp": False, "qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}


def _jais2(raw: dict[str, Any]) -> dict[str, Any]:
    norm = {"norm": "layer", "rms_norm_eps": raw.get("layer_norm_eps", 1e-5)}
    return _arcee({"attention_bias": True, "mlp_bias": True} | raw) | norm


_FAMILIES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "StableLmForCausalLM": _stablelm,
        "Starcoder2ForCausalLM": _starcoder2,
        "NemotronForCausalLM": _nemotron,
        "ArceeForCausalLM": _arcee,
        "Jais2ForCausalLM": _jais2,
    }
)


class StableLm(Decoder):
    """Sequential, or parallel where a StableLM says so."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        side_by_side = bool(config.raw.get("use_parallel_residual"))
        return (Parallel if side_by_side else PreNorm)(config, build, layer, ropes)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Nemotron stores how far the weights of its norms are from 1."""
        centred = self.config.architecture == "NemotronForCausalLM" and "norm" in name
        return tensor + 1 if centred and name.endswith("weight") else tensor


class Starcoder2(StableLm):
    """The checkpoint's names of the mlp."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "up_proj": ("c_fc",),
        "down_proj": ("c_proj",),
    }


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """Select the class that matches the tensor names of the checkpoint."""
    other = config.architecture == "Starcoder2ForCausalLM"
    return (Starcoder2 if other else StableLm)(config, build)
