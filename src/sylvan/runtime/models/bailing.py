"""Ling and Ring of inclusionAI (Bailing), and LLaDA 2.

The first generation routes by softmax, the second by sigmoids and groups of experts. LLaDA 2 has
the layers of the second, and generates by block diffusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    architecture_of,
    block_diffusion,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import FUSED, Decoder
from sylvan.runtime.models.moe import grouped_experts, sparse_layers

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `BailingMoeForCausalLM`, `BailingMoeV2ForCausalLM` and LLaDA 2."""
    filling = architecture_of(raw) == "LLaDA2MoeModelLM"
    second = filling or architecture_of(raw) == "BailingMoeV2ForCausalLM"
    first = raw.get("first_k_dense_replace", 0)
    moe = grouped_experts(raw, first=first) if second else _softmax(raw, first)
    bias = bool(raw.get("use_bias", False))
    fields = {
        "moe": moe,
        "qk_norm": "head" if raw.get("use_qk_norm", second) else "",
        "qkv_bias": bool(raw.get("use_qkv_bias", False)),
        "o_bias": bias,
        "mlp_bias": False,
    }
    if filling:
        fields |= block_diffusion(raw, block=32, mask_id=156895)
    return make_config(common_fields(raw) | fields)


def _softmax(raw: Raw, first: int) -> MoEConfig:
    inner = raw.get("moe_intermediate_size") or 0
    return MoEConfig(
        num_experts=raw.get("num_experts", 16),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=inner,
        normalise=bool(raw.get("norm_topk_prob", True)),
        layers=sparse_layers(raw, first=first),
        shared=inner * (raw.get("num_shared_experts") or 0),
    )


class Bailing(Decoder):
    """Maps tensor names; with `norm_head`, rows of the head are normalised to unit length."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("word_embeddings",),
        "self_attn": ("attention",),
        "qkv_proj": ("query_key_value",),
        "o_proj": ("dense",),
        "q_norm": ("query_layernorm",),
        "k_norm": ("key_layernorm",),
        "gate_up_proj": FUSED["gate_up_proj"],
    }

    def source_name(self, source: str) -> str:
        """The checkpoint stores the selection bias next to the router."""
        return source.replace(".gate.e_score_correction_bias", ".gate.expert_bias")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The head weight, normalised if configured."""
        normed = name == "lm_head.weight" and self.config.raw.get("norm_head")
        return F.normalize(tensor.float(), eps=1e-7) if normed else tensor


MODEL = Bailing
