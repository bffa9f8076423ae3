"""Mixture-of-experts variants of dense families.

Mixtral, DeepSeek 1, Phi-3.5-MoE, Qwen2-MoE, Qwen3-MoE and Mellum, OLMoE and FlexOlmo, GLM-4.5,
Solar Open, dots.llm1, GPT-OSS, ERNIE 4.5, Aria, XVERSE, LLaDA-MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    NotNative,
    attention_bias,
    block_diffusion,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Decoder, PostNorm, Ropes
from sylvan.runtime.models.rope import parse_rope

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw) | attention_bias(raw)
    return make_config(fields | _FAMILIES[fields["architecture"]](raw))


def experts_are_numbered(raw: Raw) -> bool:
    """Whether a checkpoint is a view of a GGUF file, which has a tensor per expert matrix."""
    made = raw.get("sylvan")
    return isinstance(made, dict) and made.get("experts") == "numbered"


def sparse_layers(raw: Raw, *, first: int = 0) -> tuple[int, ...]:
    """Layers with experts: by `mlp_layer_types`, else all from `first`, subject to switches."""
    step, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or ()
    layers = range(raw.get("num_hidden_layers") or 0)
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        return tuple(i for i in layers if kinds[i : i + 1] == ["sparse"])
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


def _sdar(raw: Raw) -> Raw:
    return _qwen3(raw) | block_diffusion(raw, block=4, mask_id=151669)


def _llada(raw: Raw) -> Raw:
    """LLaDA-MoE, which generates the answer by block diffusion."""
    for name in ("shared_expert_intermediate_size", "moe_router_enable_expert_bias"):
        if raw.get(name):
            raise ConfigError(f"config.json: {name} {raw[name]!r}, as in no published checkpoint")
    every = raw.get("moe_layer_freq")
    layers = sparse_layers(raw)
    moe = MoEConfig(
        num_experts=raw.get("num_experts") or 64,
        top_k=raw.get("num_experts_per_tok") or 8,
        inner=raw.get("expert_intermediate_size") or 0,
        normalise=bool(raw.get("norm_topk_prob", False)),
        scale=raw.get("routed_scaling_factor") or 1.0,
        layers=tuple(i for i in layers if every[i]) if isinstance(every, list) else layers,
    )
    return {
        "moe": moe,
        "intermediate_size": raw.get("dense_intermediate_size") or raw.get("intermediate_size"),
        "qk_norm": "head" if raw.get("qk_layernorm") else "",
    } | block_diffusion(raw, block=32, mask_id=156895, whole=True)


def _deepseek(raw: Raw) -> Raw:
    """The first DeepSeek with experts."""
    inner, every = raw.get("moe_intermediate_size") or 0, raw.get("moe_layer_freq") or 1
    if raw.get("scoring_func", "softmax") != "softmax":
        raise NotNative(f"the router's {raw['scoring_func']!r} (scoring_func)")
    layers = sparse_layers(raw, first=raw.get("first_k_dense_replace", 0))
    moe = MoEConfig(
        num_experts=raw.get("n_routed_experts") or 0,
        top_k=raw.get("num_experts_per_tok") or 0,
        inner=inner,
        normalise=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(layer for layer in layers if layer % every == 0),
        shared=inner * (raw.get("n_shared_experts") or 0),
    )
    return {"moe": moe}


def _xverse(raw: Raw) -> Raw:
    inner = raw.get("intermediate_size") or 0
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 64),
        top_k=raw.get("moe_top_k") or raw.get("num_experts_per_tok") or 6,
        inner=inner,
        normalise=bool(raw.get("norm_topk_prob", False)),
        layers=sparse_layers(raw),
        shared=inner * (raw.get("num_shared_experts") or 0),
    )
    return {"moe": moe}


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
    """Routing of DeepSeek-V3, GLM-4.5 and dots.llm1: sigmoids, groups, a selection bias."""
    inner = raw.get("moe_intermediate_size") or 0
    return MoEConfig(
        num_experts=_first_of(raw, "n_routed_experts", "num_local_experts", "num_experts"),
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
        shared=inner * (raw.get("n_shared_experts") or raw.get("num_shared_experts") or 0),
    )


def _first_of(raw: Raw, *names: str) -> int:
    """The value of the first of these fields that exists; 1 if none does."""
    return next((raw[name] for name in names if raw.get(name)), 1)


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


def _solar(raw: Raw) -> Raw:
    return {"moe": grouped_experts(raw, first=0), "o_bias": False}


def _flex_olmo(raw: Raw) -> Raw:
    return _olmoe({"num_experts": 7, "num_experts_per_tok": 5} | raw)


def _mellum(raw: Raw) -> Raw:
    return _qwen3({"num_local_experts": 64, "norm_topk_prob": True} | raw) | {
        "local_rope": parse_rope(raw, raw.get("max_position_embeddings") or 1, "sliding_attention")
    }


def _ernie(raw: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    every, last = raw.get("moe_layer_interval", 1), len(layers) - 1 if last == -1 else last
    inner, bias = raw.get("moe_intermediate_size") or 0, bool(raw.get("use_bias", False))
    if bias:
        raise NotNative("biases of experts (use_bias)")
    moe = MoEConfig(
        num_experts=_first_of(raw, "moe_num_experts", "num_experts", "num_local_experts"),
        top_k=_first_of(raw, "moe_k", "num_experts_per_tok"),
        inner=inner,
        normalise=True,
        correction=True,
        layers=tuple(i for i in layers if (i + 1) % every == 0 and first <= i <= last),
        shared=inner * (raw.get("moe_num_shared_experts") or 0),
    )
    tied = bool(raw.get("tie_word_embeddings", True))
    return {"moe": moe, "rope_interleaved": True, "tie_word_embeddings": tied}


def _hunyuan(raw: Raw) -> Raw:
    experts, top_k = (raw.get(name) for name in ("num_experts", "moe_topk"))
    counts = [set(n) if isinstance(n, list) else {n} for n in (experts or 1, top_k or 1)]
    if any(len(found) > 1 for found in counts):
        raise NotNative("layers with different numbers of experts")
    inner = raw.get("intermediate_size") or 0
    moe = MoEConfig(
        num_experts=counts[0].pop(),
        top_k=counts[1].pop(),
        inner=inner,
        normalise=True,
        layers=sparse_layers(raw),
        shared=inner,
    )
    return {"moe": moe, "qk_norm": "head", "qk_norm_last": True}


def _aria(raw: Raw) -> Raw:
    inner = raw.get("intermediate_size") or 0
    moe = MoEConfig(
        num_experts=_first_of(raw, "moe_num_experts", "num_experts", "num_local_experts"),
        top_k=_first_of(raw, "moe_topk", "num_experts_per_tok"),
        inner=inner,
        scores="softmax_chosen",
        layers=sparse_layers(raw),
        shared=inner * (raw.get("moe_num_shared_experts") or 0),
    )
    return {"moe": moe, "mlp_bias": False}


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
        "SDARMoeForCausalLM": _sdar,
        "LLaDAMoEModelLM": _llada,
        "OlmoeForCausalLM": _olmoe,
        "DeepseekForCausalLM": _deepseek,
        "Glm4MoeForCausalLM": _glm4,
        "Dots1ForCausalLM": _dots1,
        "GptOssForCausalLM": _gpt_oss,
        "SolarOpenForCausalLM": _solar,
        "FlexOlmoForCausalLM": _flex_olmo,
        "MellumForCausalLM": _mellum,
        "Ernie4_5_MoeForCausalLM": _ernie,
        "AriaTextForCausalLM": _aria,
        "HunYuanMoEV1ForCausalLM": _hunyuan,
        "XverseMoeForCausalLM": _xverse,
    }
)


class QwenMoe(Decoder):
    """Experts are named by number, with the names of a gated mlp."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = FUSED


class Qwen2Moe(Decoder):
    """One shared expert."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "shared_experts": ("shared_expert",)}


class Mixtral(Decoder):
    """Experts by number."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "mlp": ("block_sparse_moe",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }


class GptOss(Decoder):
    """Experts are stored as stacks, inputs first, with interleaved gate and up."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "gate": ("router",),
    }
    stacked: ClassVar[bool] = True

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose the matrices, and separate gate from up."""
        if ".experts." not in name:
            return tensor
        tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if "gate_up_proj" not in name:
            return tensor
        return torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)


class NumberedGptOss(Decoder):
    """GGUF: experts are stored one by one, gate and up separately."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "gate": ("router",),
        "gate_up_proj_bias": ("gate_proj_bias", "up_proj_bias"),
    }


class FlexOlmo(Decoder):
    """Norms after attention and experts."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return PostNorm(config, build, layer, ropes)


class Ernie(Decoder):
    """The checkpoint stores the selection bias next to the router, as a row."""

    def source_name(self, source: str) -> str:
        """The name of the bias."""
        return source.replace(".gate.e_score", ".moe_statics.e_score")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The row as a vector."""
        return tensor.flatten() if ".moe_statics." in name else tensor


class XverseMoe(Decoder):
    """A name of its own for the router."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "gate": ("router",)}


class HunyuanMoe(Decoder):
    """Other names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "q_norm": ("query_layernorm",),
        "k_norm": ("key_layernorm",),
        "gate": ("gate.wg",),
        "shared_experts": ("shared_mlp",),
    }


class Aria(Decoder):
    """Stacks of matrices, inputs before outputs."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "gate": ("router",)}
    stacked: ClassVar[bool] = True

    def source_name(self, source: str) -> str:
        """The checkpoint's names of the stacks."""
        up = source.replace(".experts.gate_up_proj", ".experts.fc1.weight")
        return up.replace(".experts.down_proj", ".experts.fc2.weight")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose the matrices."""
        return tensor.transpose(1, 2) if ".experts.fc" in name else tensor


class StackedQwen(QwenMoe):
    """Stacks of matrices (Qwen3-VL): inputs first as published, outputs first if saved again."""

    stacked: ClassVar[bool] = True

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose matrices that are stored inputs first."""
        if ".experts." not in name or self.config.moe is None:
            return tensor
        outputs = self.config.hidden_size
        if "gate_up" in name:
            outputs = 2 * self.config.moe.inner
        return tensor if tensor.shape[1] == outputs else tensor.transpose(1, 2)


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "MixtralForCausalLM": Mixtral,
        "PhimoeForCausalLM": Mixtral,
        "PhiMoEForCausalLM": Mixtral,
        "Qwen2MoeForCausalLM": Qwen2Moe,
        "GptOssForCausalLM": GptOss,
        "FlexOlmoForCausalLM": FlexOlmo,
        "Ernie4_5_MoeForCausalLM": Ernie,
        "AriaTextForCausalLM": Aria,
        "HunYuanMoEV1ForCausalLM": HunyuanMoe,
        "XverseMoeForCausalLM": XverseMoe,
    }
)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """Select the class that matches the tensor names of the checkpoint."""
    if config.media is not None and config.media.architecture.startswith("Qwen3VLMoe"):
        return StackedQwen(config, build)
    if config.architecture == "GptOssForCausalLM" and experts_are_numbered(config.raw):
        return NumberedGptOss(config, build)
    return _MODELS.get(config.architecture, QwenMoe)(config, build)
