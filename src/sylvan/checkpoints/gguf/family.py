"""Description of a GGUF architecture, and helpers that families share.

Each family inverts llama.cpp's converter for it. Tensor names that it shares with Llama are in
`names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sylvan.checkpoints.gguf.keys import Keys

Json = dict[str, Any]
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def _nothing(keys: Keys) -> Json:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture of GGUF.

    Attributes:
        name: Architecture in config.json.
        model_type: `model_type` in config.json.
        names: Names of layer tensors that differ from Llama's.
        whole: Names of other tensors that differ from Llama's.
        experts: Names of an expert's matrices by part; `{}` is the expert's number.
        config: Adds fields beyond the common ones.
        scaling: Adds RoPE scaling fields beyond the common ones.
        pairs: Whether rows of queries and keys are interleaved for llama.cpp's rotary kernel.
        raised: Whether 1 was added to norm weights.
        layer_norm: Whether norms are LayerNorms, whose epsilon has another key.
        partial: Whether only some columns of a head are rotated.
        latent: Latent attention: only `rope.dimension_count` columns of a head are rotated.
        tiled: Whether value heads of recurrent layers are interleaved by key head.
        mscale: `mscale_all_dim` is `yarn_log_multiplier` times this; 0: unknown.
    """

    name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    whole: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    experts: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    config: Callable[[Keys], Json] = _nothing
    scaling: Callable[[Keys], Json] = _nothing
    pairs: bool = False
    raised: bool = False
    layer_norm: bool = False
    partial: bool = False
    latent: bool = False
    tiled: bool = False
    mscale: float = 0.0


NUMBERED: Mapping[str, Any] = MappingProxyType({"sylvan": {"experts": "numbered"}})
"""Field of config.json: experts are stored one by one under numbers, not as stacks."""
GATE: Mapping[str, str] = MappingProxyType({"ffn_gate_inp": "mlp.gate"})
EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    }
)
SHARED: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
SHARED_ONE: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
CORRECTED: Mapping[str, str] = MappingProxyType({"exp_probs_b": "mlp.gate.e_score_correction_bias"})
MIXTRAL_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    }
)
POST_ATTENTION: Mapping[str, str] = MappingProxyType(
    {"post_attention_norm": "post_attention_layernorm"}
)


def kinds_by_pattern(keys: Keys, every: int) -> list[str]:
    """Layer types if the last of each `every` layers has full attention."""
    layers = range(keys.number("block_count"))
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]


def kinds_by_tensor(keys: Keys, other: str) -> list[str]:
    """Layer types: layers with query tensors are attention layers, the rest are `other`."""
    there = keys.header.tensors
    layers = range(keys.number("block_count") - keys.number("nextn_predict_layers", 0))
    return ["full_attention" if f"blk.{i}.attn_q.weight" in there else other for i in layers]


def multipliers(keys: Keys) -> Json:
    """Granite's multipliers."""
    heads = keys.number("attention.head_count")
    usual = (keys.number("embedding_length") // heads) ** -0.5
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", usual),
    }
