"""More of the GPT line: GPT-Neo, Japanese GPT-NeoX, CodeGen, BioGPT and XGLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder, PreNorm, Ropes
from sylvan.runtime.models.gpt2 import GPTJ, OPT, GPTNeoX, Names

Raw = dict[str, Any]

_PLAIN = {"norm": "layer", "gated_mlp": False}
_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
_FIRST_POSITION = 2  # row of the tables of BioGPT and XGLM
_CORES = 4  # TPU cores of CodeGen's training, which divide its joined projection


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    found = _FAMILIES[(raw.get("architectures") or [""])[0]](raw)
    fields = common_fields(raw | found.pop("sizes"))
    tied = bool(raw.get("tie_word_embeddings", found.pop("tied", True)))
    heads = {"num_key_value_heads": fields["num_attention_heads"], "tie_word_embeddings": tied}
    return make_config(fields | heads | _PLAIN | found)


def _neo(raw: Raw) -> Raw:
    layers, width = raw.get("num_layers") or 0, raw.get("hidden_size") or 0
    kinds = [
        k for some, count in raw.get("attention_types") or () for _ in range(count) for k in some
    ]
    window = raw.get("window_size", 256)
    return {
        "sizes": {
            "num_hidden_layers": layers,
            "num_attention_heads": raw.get("num_heads"),
            "intermediate_size": raw.get("intermediate_size") or 4 * width,
            "hidden_act": raw.get("activation_function", "gelu_new"),
        },
        "layer_windows": tuple(window if kind == "local" else None for kind in kinds),
        "attention_scale": 1.0,
        "learned_positions": True,
        "o_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }


def _japanese(raw: Raw) -> Raw:
    rotary = {"rope_theta": raw.get("rotary_emb_base", 10_000.0)}
    rotary["partial_rotary_factor"] = raw.get("rotary_pct", 1.0)
    inner = int((raw.get("hidden_size") or 0) * raw.get("intermediate_multiple_size", 4))
    act = raw.get("hidden_act", "gelu")
    return {
        "sizes": rotary | {"intermediate_size": inner, "hidden_act": act},
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
    }


def _codegen(raw: Raw) -> Raw:
    width, heads = raw.get("n_embd") or 0, raw.get("n_head") or 1
    if heads % _CORES:
        raise NotNative(f"a number of heads that {_CORES} does not divide")
    head = width // heads
    return {
        "sizes": {
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_hidden_layers": raw.get("n_layer") or 0,
            "max_position_embeddings": raw.get("n_positions"),
            "intermediate_size": raw.get("n_inner") or 4 * width,
            "hidden_act": raw.get("activation_function", "gelu_new"),
            "partial_rotary_factor": (raw.get("rotary_dim") or head) / head,
        },
        "tied": False,
        "rope_interleaved": True,
        "mlp_bias": True,
        "head_bias": True,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }


def _biogpt(raw: Raw) -> Raw:
    width = raw.get("hidden_size") or 1
    return _BIASES | {
        "sizes": {"hidden_act": raw.get("hidden_act", "gelu")},
        "learned_positions": True,
        "embed_scale": math.sqrt(width) if raw.get("scale_embedding", True) else 1.0,
        "rms_norm_eps": 1e-5,  # transformers ignores layer_norm_eps
    }


def _xglm(raw: Raw) -> Raw:
    width = raw.get("d_model") or 1
    if raw.get("add_cross_attention"):
        raise NotNative("cross-attention")
    return _BIASES | {
        "sizes": {
            "hidden_size": width,
            "num_attention_heads": raw.get("attention_heads"),
            "num_hidden_layers": raw.get("num_layers"),
            "intermediate_size": raw.get("ffn_dim"),
            "hidden_act": raw.get("activation_function", "gelu"),
        },
        "learned_positions": True,
        "embed_scale": math.sqrt(width) if raw.get("scale_embedding", True) else 1.0,
        "rms_norm_eps": 1e-5,
    }


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "GPTNeoForCausalLM": _neo,
        "GPTNeoXJapaneseForCausalLM": _japanese,
        "CodeGenForCausalLM": _codegen,
        "BioGptForCausalLM": _biogpt,
        "XGLMForCausalLM": _xglm,
    }
)


class GPTNeo(Decoder):
    """Every other layer has a window; scores are not scaled."""

    fused: ClassVar[Names] = {
        "embed_tokens": ("wte",),
        "embed_positions": ("wpe",),
        "layers": ("h",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn.attention",),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "post_attention_layernorm": ("ln_2",),
        "up_proj": ("c_fc",),
        "down_proj": ("c_proj",),
        "norm": ("ln_f",),
    }


class Japanese(GPTNeoX):
    """One block after the other; only the last adds a bias to its attention."""

    fused: ClassVar[Names] = {k: v for k, v in GPTNeoX.fused.items() if k != "lm_head"}

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        last = layer == config.num_hidden_layers - 1
        return PreNorm(msgspec.structs.replace(config, o_bias=last), build, layer, ropes)

    def source_name(self, source: str) -> str:
        """Map the name of that bias."""
        return source.replace(".dense.bias", ".dense_bias")

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name; a tied head may also be stored."""
        return name.removeprefix("gpt_neox_japanese.").replace("embed_out.", "lm_head.")


class CodeGen(GPTJ):
    """(query, value, key) of each core in turn."""

    fused: ClassVar[Names] = {**GPTJ.fused, "qkv_proj": ("qkv_proj",)}

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of the joined projection."""
        if ".qkv_proj." not in name:
            return tensor
        query, value, key = (
            part.flatten(0, 1) for part in tensor.unflatten(0, (_CORES, 3, -1)).unbind(1)
        )
        return torch.cat((query, key, value))


class BioGpt(OPT):
    """OPT with scaled embeddings, under names of its own."""

    fused: ClassVar[Names] = {**OPT.fused, "norm": ("layer_norm",)}

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name; a tied head may also be stored."""
        return name.removeprefix("biogpt.").replace("output_projection.", "lm_head.")


class XGLM(BioGpt):
    """Positions are sines and cosines, which no checkpoint has."""

    fused: ClassVar[Names] = {**OPT.fused, "norm": ("layer_norm",)}

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        assert self.embed_positions is not None
        rows, dim = self.embed_positions.weight.shape
        del self.embed_positions.weight
        self.embed_positions.weight = _sinusoids(rows, dim).to(build.device, build.dtype)

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        return name.removeprefix("model.")


def _sinusoids(rows: int, dim: int) -> torch.Tensor:
    """Sinusoidal positions: sines, then cosines. Shape: (rows, dim)."""
    half = dim // 2
    speed = torch.exp(torch.arange(half) * -(math.log(10_000) / (half - 1)))
    angle = (torch.arange(rows) + _FIRST_POSITION)[:, None] * speed
    odd = torch.zeros(rows, dim % 2)
    return torch.cat((angle.sin(), angle.cos(), odd), 1)


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "GPTNeoForCausalLM": GPTNeo,
        "GPTNeoXJapaneseForCausalLM": Japanese,
        "CodeGenForCausalLM": CodeGen,
        "BioGptForCausalLM": BioGpt,
        "XGLMForCausalLM": XGLM,
    }
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    return _MODELS[config.architecture](config, build)


MODEL = _model
