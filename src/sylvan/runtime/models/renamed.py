"""Llama under other names or with a small switch, from before transformers knew these families.

InternLM 1 and 3 (biases), EXAONE 3 and early Yi (names), Orion (layer norms), XVERSE, Aquila,
TeleFLM (multipliers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import FUSED, Decoder

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    found = _FAMILIES[(raw.get("architectures") or [""])[0]](raw)
    return make_config(common_fields(raw | found.pop("sizes", {})) | found)


def _plain(raw: Raw) -> Raw:
    return {}


def _internlm(raw: Raw) -> Raw:
    bias = bool(raw.get("bias", True))
    return {"qkv_bias": bias, "o_bias": bias}


def _internlm3(raw: Raw) -> Raw:
    bias = bool(raw.get("bias", False))
    return {"qkv_bias": bool(raw.get("qkv_bias", False)), "o_bias": bias, "mlp_bias": bias}


def _exaone(raw: Raw) -> Raw:
    sizes = {
        "num_hidden_layers": raw.get("num_layers") or raw.get("num_hidden_layers"),
        "hidden_act": raw.get("activation_function", "silu"),
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }
    return {"sizes": sizes}


def _orion(raw: Raw) -> Raw:
    bias = bool(raw.get("attention_bias", False))
    return {"norm": "layer", "qkv_bias": bias, "o_bias": bias}


def _teleflm(raw: Raw) -> Raw:
    if not raw.get("use_mup", True):
        return {}
    return {
        "embed_scale": raw.get("input_mult", 1.0),
        "logit_scale": raw.get("output_mult", 1.0) / raw.get("mup_scale_factor", 1.0),
    }


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "AquilaForCausalLM": _plain,
        "ExaoneForCausalLM": _exaone,
        "InternLM3ForCausalLM": _internlm3,
        "InternLMForCausalLM": _internlm,
        "OrionForCausalLM": _orion,
        "TeleFLMForCausalLM": _teleflm,
        "XverseForCausalLM": _plain,
        "YiForCausalLM": _plain,
    }
)


class Exaone3(Decoder):
    """EXAONE 3 and 3.5."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("wte",),
        "layers": ("h",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn.attention",),
        "qkv_proj": FUSED["qkv_proj"],
        "o_proj": ("out_proj",),
        "post_attention_layernorm": ("ln_2",),
        "gate_up_proj": ("c_fc_0", "c_fc_1"),
        "down_proj": ("c_proj",),
        "norm": ("ln_f",),
    }


class Yi(Decoder):
    """Yi as first published."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "input_layernorm": ("ln1",),
        "post_attention_layernorm": ("ln2",),
    }


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {"ExaoneForCausalLM": Exaone3, "YiForCausalLM": Yi}
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    return _MODELS.get(config.architecture, Decoder)(config, build)


MODEL = _model
