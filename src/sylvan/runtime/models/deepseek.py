"""DeepSeek V2 and V3 (R1): multi-head latent attention, and many small experts.

GLM-4.7-Flash has the same layers; Youtu and MiniCPM 3 have no experts, A.X K1 has a norm after
them. Mistral 4 and Mistral Large 3 route by softmax, and scale late queries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from torch import nn

from sylvan.kernels.api import AttentionLayer, X
from sylvan.kernels.latent import LatentShape
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.moe import MoE
from sylvan.runtime.models.config import (
    LatentConfig,
    ModelConfig,
    MoEConfig,
    NotNative,
    architecture_of,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder, Ropes, make_mlp, make_norm, scaled
from sylvan.runtime.models.llama import minicpm_multipliers, query_scaling
from sylvan.runtime.models.moe import grouped_experts, sparse_layers
from sylvan.runtime.models.rope import RopeParams

Raw = dict[str, Any]

_INDEXED = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    if raw.get("attention_bias"):
        raise NotNative("biases in latent attention")
    rope_dim = raw.get("qk_rope_head_dim") or 64
    fields = common_fields(raw | {"head_dim": rope_dim, "num_key_value_heads": 1})
    latent = LatentConfig(
        q_rank=raw.get("q_lora_rank"),
        latent=raw.get("kv_lora_rank") or 512,
        nope=raw.get("qk_nope_head_dim") or 128,
        rope_dim=rope_dim,
        value=raw.get("v_head_dim") or 128,
        index=(raw.get("index_head_dim") or 128) if architecture_of(raw) in _INDEXED else 0,
    )
    found = {
        "latent": latent,
        "rope_interleaved": bool(raw.get("rope_interleave", True)),
        "attention_scale": (latent.nope + rope_dim) ** -0.5 * _stretch(fields["rope"]),
    }
    return make_config(fields | found | _FAMILIES[fields["architecture"]](raw))


def _first_dense(layers: int) -> Callable[[Raw], Raw]:
    """Routing of version 3; experts start at a default layer unless config.json names one."""
    return lambda raw: {"moe": grouped_experts(raw, first=_first(raw, layers))}


def _mistral4(raw: Raw) -> Raw:
    moe = grouped_experts(raw, first=_first(raw, 0))
    return {
        "moe": msgspec.structs.replace(moe, scores="softmax", correction=False),
        "query_scaling": query_scaling(raw),
    }


def _youtu(raw: Raw) -> Raw:
    return {"tie_word_embeddings": bool(raw.get("tie_word_embeddings", True))}


def _minicpm3(raw: Raw) -> Raw:
    return minicpm_multipliers({"scale_emb": 12, "scale_depth": 1.4} | raw) | {
        "rope_interleaved": False
    }


def _first(raw: Raw, default: int) -> int:
    found = raw.get("first_k_dense_replace")
    return default if found is None else found


def _stretch(rope: RopeParams) -> float:
    """YaRN's attention factor for long contexts, squared: for queries and for keys."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or (rope.factor or 1) <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor or 1) + 1) ** 2


def _greedy(raw: Raw) -> Raw:
    """Version 2: softmax over all experts; groups are ranked by their best expert."""
    groups = raw.get("topk_method", "greedy") == "group_limited_greedy"
    inner = raw.get("moe_intermediate_size") or 0
    moe = MoEConfig(
        num_experts=raw.get("n_routed_experts") or 64,
        top_k=raw.get("num_experts_per_tok") or 6,
        inner=inner,
        scale=raw.get("routed_scaling_factor", 1.0),
        groups=(raw.get("n_group") or 1) if groups else 1,
        kept_groups=(raw.get("topk_group") or 1) if groups else 1,
        layers=sparse_layers(raw, first=_first(raw, 0)),
        shared=inner * (raw.get("n_shared_experts") or 0),
    )
    return {"moe": moe}


def _beside_others(raw: Raw) -> Raw:
    """Experts next to the feed-forward block instead of in its place: see `longcat`."""
    moe = MoEConfig(
        num_experts=raw.get("n_routed_experts") or 1,
        top_k=raw.get("moe_topk") or raw.get("num_experts_per_tok") or 12,
        inner=raw.get("expert_ffn_hidden_size") or raw.get("moe_intermediate_size") or 1,
        scale=raw.get("routed_scaling_factor", 1.0),
        router_bias=bool(raw.get("router_bias", False)),
        correction=True,
        layers=(),
    )
    return {"moe": moe}


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _greedy,
        "DeepseekV3ForCausalLM": _first_dense(3),
        "DeepseekV32ForCausalLM": _first_dense(3),
        "GlmMoeDsaForCausalLM": _first_dense(3),
        "Glm4MoeLiteForCausalLM": _first_dense(1),
        "AXK1ForCausalLM": _first_dense(1),
        "LongcatFlashForCausalLM": _beside_others,
        "Mistral4ForCausalLM": _mistral4,
        "MistralLarge3ForCausalLM": _mistral4,
        "YoutuForCausalLM": _youtu,
        "MiniCPM3ForCausalLM": _minicpm3,
    }
)


class LatentBlock(nn.Module):
    """Pre-norm, as Llama's, around latent attention."""

    attention: ClassVar[type[LatentAttention]] = LatentAttention

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        sizes = config.latent
        assert sizes is not None
        heads = build.mesh.query_heads(config.num_attention_heads)
        shape = LatentShape(
            num_heads=heads.size,
            nope=sizes.nope,
            rope_dim=sizes.rope_dim,
            value=sizes.value,
            latent=sizes.latent,
        )
        spec = AttentionLayer(
            index=layer,
            num_heads=heads.size,
            num_kv_heads=1,
            head_dim=sizes.latent + sizes.rope_dim,
            v_head_dim=sizes.latent,
            scale=config.attention_scale or 1.0,
        )
        rope = ropes.of(layer)
        assert rope is not None
        self.input_layernorm = make_norm(config, build)
        given = config.hidden_size, heads, shape, spec, sizes.q_rank
        self.self_attn = self.attention(build, *given)
        self.self_attn.use_rope(rope)
        self.self_attn.scale_by(ropes.scales_of(layer))
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        normed = config.architecture == "AXK1ForCausalLM" and isinstance(self.mlp, MoE)
        self.post_mlp_layernorm = make_norm(config, build) if normed else None
        self._scale = config.residual_scale

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD = scaled(self.self_attn(h_TD, batch), self._scale)
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        h_TD = scaled(self.mlp(h_TD), self._scale)
        if self.post_mlp_layernorm is not None:
            h_TD, _ = self.post_mlp_layernorm(h_TD)
        return h_TD, stream_TD


class Deepseek(Decoder):
    """A decoder of these blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return LatentBlock(config, build, layer, ropes)


class MistralLarge3(Deepseek):
    """Names of Mistral's own format."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("tok_embeddings",),
        "lm_head": ("output",),
        "input_layernorm": ("attention_norm",),
        "post_attention_layernorm": ("ffn_norm",),
        "self_attn": ("attention",),
        "q_a_proj": ("wq_a",),
        "q_a_layernorm": ("q_a_norm",),
        "q_b_proj": ("wq_b",),
        "kv_a_proj_with_mqa": ("wkv_a_with_mqa",),
        "kv_a_layernorm": ("kv_a_norm",),
        "kv_b_proj": ("wkv_b",),
        "o_proj": ("wo",),
        "mlp": ("feed_forward",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }

    def source_name(self, source: str) -> str:
        """The checkpoint stores experts next to the mlp."""
        return re.sub(r"\.feed_forward\.(gate|experts|shared_experts)\.", r".\1.", source)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    kind = MistralLarge3 if config.architecture == "MistralLarge3ForCausalLM" else Deepseek
    return kind(config, build)


MODEL = _model
