"""Phi-3-small: block-sparse attention, clamped gelu gates, and muP multipliers.

The checkpoint interleaves queries, key and value of each group, and gate and up of the mlp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import BlockPattern, Clamping
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.block_sparse import BlockSparseAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.mlp import ClampedMLP
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config
from sylvan.runtime.models.decoder import Attention, Decoder, PreNorm, Ropes, ungroup_qkv

Raw = dict[str, Any]

_ALPHA = 1.702  # of the sigmoid that approximates gelu
_NEVER = -3e4  # logit of unused ids
_STANDING_FOR_NOTHING = (100256, 100258, 100259, 100260, 100264, 100265, *range(100267, 100352))


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `Phi3SmallForCausalLM`.

    Raises:
        ConfigError: See `pattern_of`; or an option is set that no published checkpoint has.
    """
    if raw.get("hidden_act", "gegelu") != "gegelu" or raw.get("rope_position_scale", 1.0) != 1.0:
        raise ConfigError(
            "config.json: other activations, or scaled positions, of Phi-3-small are not supported"
        )
    sizes = {
        "hidden_act": "quick_gelu",
        "intermediate_size": raw.get("ff_intermediate_size"),
        "rope_theta": raw.get("rope_embedding_base", 1_000_000.0),
        "rope_scaling": _scaling(raw),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }
    fields = common_fields(raw | sizes)
    if fields.get("head_dim") and raw.get("mup_use_scaling", True):
        fields["attention_scale"] = raw.get("mup_attn_multiplier", 1.0) / fields["head_dim"]
    fields |= {
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "embed_scale": raw.get("mup_embedding_multiplier") or 1.0,
        "logit_scale": 1.0 / (raw.get("mup_width_multiplier") or 1.0),
    }
    config = make_config(fields)
    pattern_of(config, 0)
    return config


def _scaling(raw: Raw) -> Raw | None:
    """LongRoPE with its factor, which published checkpoints say twice."""
    found = raw.get("rope_scaling")
    if not isinstance(found, dict) or "short_mscale" not in found:
        return found
    if found["short_mscale"] != found.get("long_mscale"):
        raise ConfigError(
            "config.json: rotary factors that differ for short and long contexts are not supported"
        )
    return found | {"attention_factor": found["short_mscale"]}


def pattern_of(config: ModelConfig, layer: int, first_head: int = 0) -> BlockPattern | None:
    """The block pattern of a layer; None: full attention.

    Raises:
        ConfigError: Block sizes are impossible.
    """
    raw, found = config.raw, dict[str, int]()
    for name, default in (("block_size", 64), ("num_local_blocks", 16), ("vert_stride", 8)):
        value = raw.get(f"blocksparse_{name}", default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: blocksparse_{name} must be positive, it is {value!r}")
        found[name] = value
    every = raw.get("dense_attention_every_n_layers")
    if every and (layer + 1) % every == 0:
        return None
    stride, alike = found["vert_stride"], raw.get("blocksparse_homo_head_pattern", False)
    return BlockPattern(
        size=found["block_size"],
        near=found["num_local_blocks"],
        stride=stride,
        step=0 if alike else max(1, stride // config.num_attention_heads),
        first_head=first_head,
    )


class BlockAttention(Attention):
    """Attention with the layer's block pattern."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        pattern = pattern_of(config, layer, heads.queries.start)
        if pattern is not None and build.length > pattern.dense:
            self.attn = BlockSparseAttention(self.attn.layer, ropes.of(layer), pattern)


class Phi3SmallBlock(PreNorm):
    """Pre-norm, as Llama's."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        self.self_attn = BlockAttention(config, build, layer, ropes)
        limit = config.raw.get("gegelu_limit")
        limit = math.inf if limit is None else float(limit)
        sizes = config.hidden_size, config.intermediate_size
        clamping = Clamping(limit, "gpt_oss", _ALPHA)
        self.mlp = ClampedMLP(build, sizes, config.hidden_act, clamping, bias=True)


class Phi3Small(Decoder):
    """Maps tensor names, and masks the logits of unused ids."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("query_key_value",),
        "o_proj": ("dense",),
        "gate_up_proj": ("up_proj",),
        "norm": ("final_layernorm",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        idle = config.raw.get("dummy_token_indices", _STANDING_FOR_NOTHING)
        idle = [token for token in idle if token < config.vocab_size]
        if self.lm_head is not None and idle:
            whole = torch.zeros(config.vocab_size, dtype=build.dtype, device=build.device)
            whole[idle] = _NEVER
            rows = Split(build.mesh.rows(config.vocab_size))
            self.lm_head.bias = rows.take(whole, 0)

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Phi3SmallBlock(config, build, layer, ropes)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Separate queries, keys and values, and gate and up projections."""
        config = self.config
        if ".query_key_value." in name:
            return ungroup_qkv(tensor, config.num_key_value_heads, config.head_dim)
        if ".up_proj." in name:
            return torch.cat((tensor[::2], tensor[1::2]))
        return tensor


MODEL = Phi3Small
