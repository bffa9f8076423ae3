"""InternLM 2 and Baichuan: Llama under other names, from before transformers knew them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.alibi import default_slopes
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Decoder, ungroup_qkv

_ALIBI_HIDDEN = 5120  # Baichuan of 13 billion parameters


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of `InternLM2ForCausalLM` and `BaichuanForCausalLM`.

    Baichuan 13B has ALiBi instead of rotary positions; only its size identifies it.
    """
    fields = common_fields({"max_position_embeddings": raw.get("model_max_length")} | raw)
    bias = bool(raw.get("bias", False))
    found = {"qkv_bias": bias, "o_bias": bias}
    large = raw.get("hidden_size") == _ALIBI_HIDDEN or raw.get("position_embedding") == "ALIBI"
    if "Baichuan" in fields["architecture"] and large:
        found |= {
            "alibi_slopes": default_slopes(raw.get("num_attention_heads") or 1),
            "nope_layers": tuple(range(raw.get("num_hidden_layers") or 0)),
        }
    return make_config(fields | found)


class InternLM2ForCausalLM(Decoder):
    """The projection has queries, key and value of each group together."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("tok_embeddings",),
        "self_attn": ("attention",),
        "qkv_proj": ("wqkv",),
        "o_proj": ("wo",),
        "mlp": ("feed_forward",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
        "input_layernorm": ("attention_norm",),
        "post_attention_layernorm": ("ffn_norm",),
        "lm_head": ("output",),
        "score": ("v_head",),
    }

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of the joined projection."""
        if ".wqkv." not in name:
            return tensor
        return ungroup_qkv(tensor, self.config.num_key_value_heads, self.config.head_dim)


class BaichuanForCausalLM(Decoder):
    """Joined projections; from version 2 on, rows of the head have unit length."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("W_pack",),
        "gate_up_proj": FUSED["gate_up_proj"],
    }

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Version 2 is recognised by its vocabulary."""
        second = self.config.vocab_size == 125696
        return F.normalize(tensor.float()) if second and name == "lm_head.weight" else tensor


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """Select the class that matches the tensor names of the checkpoint."""
    intern = config.architecture == "InternLM2ForCausalLM"
    return (InternLM2ForCausalLM if intern else BaichuanForCausalLM)(config, build)
