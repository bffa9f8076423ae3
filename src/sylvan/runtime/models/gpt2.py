"""The GPT-2 line: GPT-2 and OPT (learned positions), GPT-BigCode, GPT-J, GPT-NeoX, Phi, Falcon.

Tables map module names to checkpoint names; layouts are transposed at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import (
    Decoder,
    Parallel,
    ParallelTwoNorms,
    PreNorm,
    Ropes,
    ungroup_qkv,
)

Names = Mapping[str, tuple[str, ...]]
Raw = dict[str, Any]

_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
_PLAIN = {"norm": "layer", "gated_mlp": False}


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    architecture = (raw.get("architectures") or [""])[0]
    return make_config(_FAMILIES[architecture](raw))


def _gpt2(raw: Raw) -> Raw:
    unusual = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    if any(raw.get(name) for name in unusual) or not raw.get("scale_attn_weights", True):
        raise NotNative("its variant of attention")
    one_kv = raw.get("multi_query", False)
    sizes = _old_names(raw, "n_embd", "n_head", "n_layer", "n_positions", "n_inner")
    sizes["num_key_value_heads"] = 1 if one_kv else sizes["num_attention_heads"]
    act = raw.get("activation_function", "gelu_new")
    return (
        common_fields(raw | sizes | {"hidden_act": act})
        | _PLAIN
        | _BIASES
        | {
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "learned_positions": True,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }
    )


def _opt(raw: Raw) -> Raw:
    if not raw.get("do_layer_norm_before", True) or raw.get("_remove_final_layer_norm"):
        raise NotNative("norms after the residual")
    if raw.get("word_embed_proj_dim", raw.get("hidden_size")) != raw.get("hidden_size"):
        raise NotNative("projected embeddings")
    if not raw.get("layer_norm_elementwise_affine", True):
        raise NotNative("norms without weights")
    bias = bool(raw.get("enable_bias", True))
    act = raw.get("activation_function", "relu")
    sizes = {"intermediate_size": raw.get("ffn_dim"), "hidden_act": act}
    return (
        common_fields(raw | sizes)
        | _PLAIN
        | {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": raw.get("num_attention_heads"),
            "learned_positions": True,
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": bias,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }
    )


def _gptj(raw: Raw) -> Raw:
    sizes = _old_names(raw, "n_embd", "n_head", "n_layer", "n_positions", "n_inner")
    act = raw.get("activation_function", "gelu_new")
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    rotary = {"partial_rotary_factor": (raw.get("rotary_dim") or head) / head}
    return (
        common_fields(raw | sizes | rotary | {"hidden_act": act})
        | _PLAIN
        | {
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "num_key_value_heads": sizes["num_attention_heads"],
            "rope_interleaved": True,
            "mlp_bias": True,
            "head_bias": True,
        }
    )


def _neox(raw: Raw) -> Raw:
    bias = bool(raw.get("attention_bias", True))
    rotary = {"rope_theta": raw.get("rotary_emb_base", 10_000.0)}
    rotary["partial_rotary_factor"] = raw.get("rotary_pct", 0.25)
    return (
        common_fields(rotary | {"hidden_act": "gelu"} | raw)
        | _PLAIN
        | {
            "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
            "num_key_value_heads": raw.get("num_attention_heads"),
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": True,
        }
    )


def _phi(raw: Raw) -> Raw:
    if raw.get("qk_layernorm"):
        raise NotNative("layer norms of heads (qk_layernorm)")
    rotary = {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}
    eps = {"rms_norm_eps": raw.get("layer_norm_eps", 1e-5), "head_bias": True}
    return common_fields(rotary | raw) | _PLAIN | _BIASES | eps


def _falcon(raw: Raw) -> Raw:
    if raw.get("alibi"):
        raise NotNative("ALiBi positions")
    heads = raw.get("num_attention_heads")
    kv = raw.get("num_kv_heads") or heads
    if not raw.get("new_decoder_architecture") and raw.get("multi_query", True):
        kv = 1
    bias = bool(raw.get("bias", False))
    inner = raw.get("ffn_hidden_size") or 4 * (raw.get("hidden_size") or 0)
    sizes = {"num_key_value_heads": kv, "intermediate_size": inner}
    return (
        common_fields(raw | sizes | {"hidden_act": raw.get("activation", "gelu")})
        | _PLAIN
        | {
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": bias,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }
    )


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "GPT2LMHeadModel": _gpt2,
        "GPTBigCodeForCausalLM": _gpt2,
        "OPTForCausalLM": _opt,
        "GPTJForCausalLM": _gptj,
        "GPTNeoXForCausalLM": _neox,
        "PhiForCausalLM": _phi,
        "FalconForCausalLM": _falcon,
    }
)


def _old_names(raw: Raw, dim: str, heads: str, layers: str, positions: str, inner: str) -> Raw:
    """GPT-2 spells the sizes its own way."""
    width = raw.get(dim) or 0
    return {
        "hidden_size": width,
        "num_attention_heads": raw.get(heads) or 1,
        "num_hidden_layers": raw.get(layers) or 0,
        "max_position_embeddings": raw.get(positions),
        "intermediate_size": raw.get(inner) or 4 * width,
    }


_GPT2_NAMES: Names = {
    "embed_tokens": ("wte",),
    "embed_positions": ("wpe",),
    "layers": ("h",),
    "input_layernorm": ("ln_1",),
    "self_attn": ("attn",),
    "qkv_proj": ("c_attn",),
    "o_proj": ("c_proj",),
    "post_attention_layernorm": ("ln_2",),
    "up_proj": ("c_fc",),
    "down_proj": ("c_proj",),
    "norm": ("ln_f",),
}


FALCON_NAMES: Names = {
    "embed_tokens": ("word_embeddings",),
    "layers": ("h",),
    "self_attn": ("self_attention",),
    "qkv_proj": ("query_key_value",),
    "o_proj": ("dense",),
    "up_proj": ("dense_h_to_4h",),
    "down_proj": ("dense_4h_to_h",),
    "norm": ("ln_f",),
}
"""Those of BLOOM, too."""


class GPT2(Decoder):
    """`Conv1D` weights are stored (in, out)."""

    fused: ClassVar[Names] = _GPT2_NAMES

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose matrices."""
        return tensor.T if ".c_" in name and tensor.dim() == 2 else tensor


class GPTBigCode(Decoder):
    """One key head for all queries, or (query, key, value) of each head in turn."""

    fused: ClassVar[Names] = _GPT2_NAMES

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of the joined projection."""
        groups = self.config.num_key_value_heads
        return ungroup_qkv(tensor, groups, self.config.head_dim) if ".c_attn." in name else tensor


class OPT(Decoder):
    """Positions start at row 2 of their table."""

    fused: ClassVar[Names] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "input_layernorm": ("self_attn_layer_norm",),
        "post_attention_layernorm": ("final_layer_norm",),
        "norm": ("final_layer_norm",),
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
        "mlp": (),
    }

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Drop the two rows before position 0."""
        return tensor[2:] if name == "embed_positions.weight" else tensor


class GPTJ(Decoder):
    """Attention and mlp side by side."""

    fused: ClassVar[Names] = {
        "embed_tokens": ("wte",),
        "layers": ("h",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn",),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "up_proj": ("fc_in",),
        "down_proj": ("fc_out",),
        "norm": ("ln_f",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Parallel(config, build, layer, ropes)


class Phi(GPTJ):
    """Phi-1 to Phi-2: the same arrangement."""

    fused: ClassVar[Names] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("dense",),
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
        "norm": ("final_layernorm",),
    }


class GPTNeoX(Decoder):
    """(query, key, value) of each head in turn."""

    fused: ClassVar[Names] = {
        "embed_tokens": ("embed_in",),
        "self_attn": ("attention",),
        "qkv_proj": ("query_key_value",),
        "o_proj": ("dense",),
        "up_proj": ("dense_h_to_4h",),
        "down_proj": ("dense_4h_to_h",),
        "norm": ("final_layer_norm",),
        "lm_head": ("embed_out",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        side_by_side = config.raw.get("use_parallel_residual", True)
        return (ParallelTwoNorms if side_by_side else PreNorm)(config, build, layer, ropes)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of the joined projection."""
        if ".query_key_value." not in name:
            return tensor
        return ungroup_qkv(tensor, self.config.num_key_value_heads, self.config.head_dim)


class Falcon(GPTNeoX):
    """One norm or two, by size and age."""

    fused: ClassVar[Names] = FALCON_NAMES

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        raw = config.raw
        if raw.get("new_decoder_architecture"):
            two = raw.get("num_ln_in_parallel_attn") in (None, 2)
        elif not raw.get("parallel_attn", True):
            return PreNorm(config, build, layer, ropes)
        else:
            two = False
        return (ParallelTwoNorms if two else Parallel)(config, build, layer, ropes)


class NewFalcon(Falcon):
    """The names of the two norms."""

    fused: ClassVar[Names] = {
        **FALCON_NAMES,
        "input_layernorm": ("ln_attn",),
        "post_attention_layernorm": ("ln_mlp",),
    }


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "GPT2LMHeadModel": GPT2,
        "GPTBigCodeForCausalLM": GPTBigCode,
        "OPTForCausalLM": OPT,
        "GPTJForCausalLM": GPTJ,
        "GPTNeoXForCausalLM": GPTNeoX,
        "PhiForCausalLM": Phi,
        "FalconForCausalLM": Falcon,
    }
)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """Select the class that matches the tensor names of the checkpoint."""
    raw = config.raw
    if raw.get("new_decoder_architecture") and raw.get("num_ln_in_parallel_attn") in (None, 2):
        return NewFalcon(config, build)
    return _MODELS[config.architecture](config, build)
