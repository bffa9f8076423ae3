"""Decoders with mixtures of experts, each its dense cousin with another feed-forward.

Mixtral, Phi-3.5-MoE, Qwen2-MoE and Qwen3-MoE, OLMoE, GLM-4.5, dots.llm1, GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    NotNative,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Decoder

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw)
    bias = bool(raw.get("attention_bias", False))
    return make_config(
        fields | {"qkv_bias": bias, "o_bias": bias} | _FAMILIES[fields["architecture"]](raw)
    )


def sparse_layers(raw: Raw, *, first: int = 0) -> tuple[int, ...]:
    """Layers with experts: from `first`, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or ()
    layers = range(raw.get("num_hidden_layers") or 0)
    return tuple(i for i in layers if i >= first and i not in dense and (i + 1) % step == 0)


def _mixtral(raw: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 8),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        scores="softmax_chosen",
        layers=sparse_layers(raw),
    )
    return {"moe": moe, "layer_windows": sliding_windows(raw, default_on=True)}


def _phimoe(raw: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 16),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        scores="sparsemixer",
        jitter=raw.get("router_jitter_noise", 0.01),
        layers=sparse_layers(raw),
    )
    if (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("short_mscale"):
        raise NotNative("rotary factors that differ between short and long texts")
    return {
        "moe": moe,
        "norm": "layer",
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "head_bias": bool(raw.get("lm_head_bias", False)),
        "layer_windows": sliding_windows(raw, default_on=True),
    }


def _qwen2(raw: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 60),
        top_k=raw.get("num_experts_per_tok", 4),
        inner=raw.get("moe_intermediate_size") or 0,
        normalise=bool(raw.get("norm_topk_prob", False)),
        layers=sparse_layers(raw),
        shared=raw.get("shared_expert_intermediate_size", 0),
        shared_gate=True,
    )
    bias = bool(raw.get("qkv_bias", True))
    windows = sliding_windows(raw, default_on=False)
    return {"moe": moe, "qkv_bias": bias, "o_bias": False, "layer_windows": windows}


def _qwen3(raw: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_experts") or raw.get("num_local_experts") or 128,
        top_k=raw.get("num_experts_per_tok", 8),
        inner=raw.get("moe_intermediate_size") or 0,
        normalise=bool(raw.get("norm_topk_prob", False)),
        layers=sparse_layers(raw),
    )
    windows = sliding_windows(raw, default_on=False)
    return {"moe": moe, "qk_norm": "head", "layer_windows": windows}


def _olmoe(raw: Raw) -> Raw:
    if raw.get("clip_qkv") is not None:
        raise NotNative("clipped projections (clip_qkv)")
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 64),
        top_k=raw.get("num_experts_per_tok", 8),
        inner=raw.get("intermediate_size") or 0,
        normalise=bool(raw.get("norm_topk_prob", False)),
        layers=sparse_layers(raw),
    )
    return {"moe": moe, "qk_norm": "whole"}


def grouped_experts(raw: Raw, *, first: int) -> MoEConfig:
    """The mixture of DeepSeek-V3, GLM-4.5 and dots.llm1: sigmoids, groups, a bias for choosing."""
    inner = raw.get("moe_intermediate_size") or 0
    return MoEConfig(
        num_experts=raw.get("n_routed_experts") or raw.get("num_local_experts") or 1,
        top_k=raw.get("num_experts_per_tok") or 1,
        inner=inner,
        scores="sigmoid",
        normalise=bool(raw.get("norm_topk_prob", True)),
        scale=raw.get("routed_scaling_factor", 1.0),
        groups=raw.get("n_group") or 1,
        kept_groups=raw.get("topk_group") or 1,
        group_rank="best_two",
        correction=True,
        layers=sparse_layers(raw, first=first),
        shared=inner * (raw.get("n_shared_experts") or 0),
    )


def _glm4(raw: Raw) -> Raw:
    bias = bool(raw.get("attention_bias", False))
    return {
        "moe": grouped_experts(raw, first=raw.get("first_k_dense_replace", 1)),
        "qk_norm": "head" if raw.get("use_qk_norm") else "",
        "qkv_bias": bias,
        "o_bias": False,
    }


def _dots1(raw: Raw) -> Raw:
    return {
        "moe": grouped_experts(raw, first=raw.get("first_k_dense_replace", 0)),
        "qk_norm": "head",
        "layer_windows": sliding_windows(raw, default_on=True),
    }


def _gpt_oss(raw: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    bias = bool(raw.get("attention_bias", True))
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 128),
        top_k=raw.get("num_experts_per_tok") or raw.get("experts_per_token") or 4,
        inner=raw.get("intermediate_size") or 0,
        scores="softmax_chosen",
        layers=sparse_layers(raw),
        router_bias=True,
        expert_bias=True,
        alpha=raw.get("swiglu_alpha", 1.702),
        limit=raw.get("swiglu_limit", 7.0),
    )
    types = raw.get("layer_types") or default
    return {
        "moe": moe,
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "layer_windows": sliding_windows(raw | {"layer_types": types}, default_on=True),
    }


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "MixtralForCausalLM": _mixtral,
        "PhimoeForCausalLM": _phimoe,
        "PhiMoEForCausalLM": _phimoe,
        "Qwen2MoeForCausalLM": _qwen2,
        "Qwen3MoeForCausalLM": _qwen3,
        "OlmoeForCausalLM": _olmoe,
        "Glm4MoeForCausalLM": _glm4,
        "Dots1ForCausalLM": _dots1,
        "GptOssForCausalLM": _gpt_oss,
    }
)


class QwenMoe(Decoder):
    """Experts are named by number, with the names of a gated mlp."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = FUSED


class Qwen2Moe(Decoder):
    """One shared expert."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "shared_experts": ("shared_expert",)}


class Mixtral(Decoder):
    """Numbers for names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "mlp": ("block_sparse_moe",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }


class GptOss(Decoder):
    """The experts are stored as stacks, inputs before outputs, gate and up taking turns."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "gate": ("router",),
    }
    stacked: ClassVar[bool] = True

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Turn the matrices round, and sort gate from up."""
        if ".experts." not in name:
            return tensor
        tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if "gate_up_proj" not in name:
            return tensor
        return torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "MixtralForCausalLM": Mixtral,
        "PhimoeForCausalLM": Mixtral,
        "PhiMoEForCausalLM": Mixtral,
        "Qwen2MoeForCausalLM": Qwen2Moe,
        "GptOssForCausalLM": GptOss,
    }
)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """The class whose names fit the checkpoint."""
    return _MODELS.get(config.architecture, QwenMoe)(config, build)
