"""GGUF families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sylvan.checkpoints.gguf.family import (
    CORRECTED,
    EXPERTS,
    GATE,
    MIXTRAL_EXPERTS,
    NUMBERED,
    POST_ATTENTION,
    SHARED,
    SHARED_ONE,
    GgufFamily,
    Json,
    kinds_by_pattern,
    multipliers,
)
from sylvan.checkpoints.gguf.keys import Keys

_SIGMOID = 2
"""Values of `expert_gating_func`."""
_QUERY_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}

MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    "mixtral",
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=MIXTRAL_EXPERTS,
    config=lambda keys: {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
    },
    pairs=True,
)
"""Files use the name `llama` for it."""


def qwen_experts(keys: Keys) -> Json:
    """Expert settings as the Qwen families name them."""
    found = {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return found | {"norm_topk_prob": True}


def _olmoe(keys: Keys) -> Json:
    return {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "norm_topk_prob": False,
    }


def _qwen2_moe(keys: Keys) -> Json:
    shared = keys.number("expert_shared_feed_forward_length")
    more = {"shared_expert_intermediate_size": shared, "qkv_bias": keys.has("blk.0.attn_q.bias")}
    return qwen_experts(keys) | more | {"norm_topk_prob": False}


def _grouped(keys: Keys) -> Json:
    """Expert settings as DeepSeek's families name them."""
    return {
        "n_routed_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "n_shared_experts": keys.number("expert_shared_count", 0),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.value("expert_weights_norm", False)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def _gpt_oss(keys: Keys) -> Json:
    return {
        **NUMBERED,
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "sliding_window": keys.number("attention.sliding_window", 128),
        "layer_types": kinds_by_pattern(keys, 2),
        "attention_bias": True,
    }


def _latent(keys: Keys) -> Json:
    """DeepSeek V2, V3 and relatives; files have up-projections joined, or split by kind."""
    rope_dim = keys.number("rope.dimension_count")
    whole = keys.number("attention.key_length_mla", keys.number("attention.key_length"))
    found = {
        "q_lora_rank": keys.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": whole - rope_dim,
        "v_head_dim": keys.number(
            "attention.value_length_mla", keys.number("attention.value_length")
        ),
        "num_key_value_heads": keys.number("attention.head_count"),
        "attention_bias": False,
    }
    if not keys.number("expert_count", 0):
        return found | {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    found = _grouped(keys) | found
    if keys.number("expert_gating_func", 1) == _SIGMOID:
        return found
    groups = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    older = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    return found | older | {"topk_method": groups}


def _llama4(keys: Keys) -> Json:
    count, layers = keys.number("expert_count"), range(keys.number("block_count"))
    there = keys.header.tensors
    return {
        **NUMBERED,
        "num_local_experts": count,
        "num_experts_per_tok": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.number("feed_forward_length"),
        "moe_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in there],
        "use_qk_norm": count <= _MAX_EXPERTS_WITH_NORMS,
        "attention_chunk_size": keys.number("attention.chunk_size", 8192),
    }


_MAX_EXPERTS_WITH_NORMS = 16
"""Scout has head norms, Maverick does not; files do not record it."""


def _granite_moe(keys: Keys) -> Json:
    return multipliers(keys) | {
        **NUMBERED,
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "shared_intermediate_size": keys.number("expert_shared_feed_forward_length", 0),
    }


def _hunyuan_moe(keys: Keys) -> Json:
    return {
        "num_experts": keys.number("expert_count"),
        "moe_topk": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length"),
    }


def _ernie(keys: Keys) -> Json:
    return {
        "moe_num_experts": keys.number("expert_count"),
        "moe_k": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.number("expert_shared_count", 0),
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_interval": keys.number("interleave_moe_layer_step", 1),
    }


def _minimax(keys: Keys) -> Json:
    return {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length"),
    }


def _bailing(keys: Keys) -> Json:
    """Ling 1: DeepSeek's first mixture; the file lacks `norm_topk_prob`."""
    return _grouped(keys) | {"norm_topk_prob": True}


def _bailing2(keys: Keys) -> Json:
    found = _grouped(keys)
    return found | {
        "num_experts": found["n_routed_experts"],
        "num_shared_experts": found["n_shared_experts"],
        "use_qk_norm": True,
    }


MIXTURES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "qwen2moe": GgufFamily(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            names={**GATE, **SHARED_ONE},
            experts=EXPERTS,
            config=_qwen2_moe,
        ),
        "qwen3moe": GgufFamily(
            "Qwen3MoeForCausalLM", "qwen3_moe", names=GATE, experts=EXPERTS, config=qwen_experts
        ),
        "olmoe": GgufFamily(
            "OlmoeForCausalLM",
            "olmoe",
            names=GATE,
            experts=EXPERTS,
            config=_olmoe,
        ),
        "dots1": GgufFamily(
            "Dots1ForCausalLM",
            "dots1",
            names={**GATE, **SHARED, **CORRECTED},
            experts=EXPERTS,
            config=_grouped,
        ),
        "glm4moe": GgufFamily(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            names={**GATE, **SHARED, **CORRECTED, **POST_ATTENTION},
            experts=EXPERTS,
            config=lambda keys: _grouped(keys) | {"use_qk_norm": keys.has("attn_q_norm.weight")},
            partial=True,
        ),
        "qwen3vlmoe": GgufFamily(
            "Qwen3MoeForCausalLM", "qwen3_moe", names=GATE, experts=EXPERTS, config=qwen_experts
        ),
        "gpt-oss": GgufFamily(
            "GptOssForCausalLM",
            "gpt_oss",
            names={
                **POST_ATTENTION,
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
            experts=EXPERTS,
            config=_gpt_oss,
            scaling=lambda keys: {"truncate": False},
        ),
        "deepseek": GgufFamily(
            "DeepseekForCausalLM",
            "deepseek",
            names={**GATE, **SHARED},
            experts=EXPERTS,
            config=_grouped,
            pairs=True,
        ),
        "deepseek2": GgufFamily(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            names={
                **GATE,
                **SHARED,
                **CORRECTED,
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.k_b_proj",
                "attn_v_b": "self_attn.v_b_proj",
            },
            experts=EXPERTS,
            config=_latent,
            latent=True,
            mscale=10.0,
        ),
        "llama4": GgufFamily(
            "Llama4ForCausalLM",
            "llama4_text",
            names={**GATE, **SHARED},
            experts=EXPERTS,
            config=_llama4,
        ),
        "granitemoe": GgufFamily(
            "GraniteMoeSharedForCausalLM",
            "granitemoeshared",
            names={**GATE, **SHARED},
            experts=EXPERTS,
            config=_granite_moe,
            pairs=True,
        ),
        "hunyuan-moe": GgufFamily(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            names={
                **_QUERY_NORMS,
                "ffn_gate_inp": "mlp.gate.wg",
                "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
                "ffn_up_shexp": "mlp.shared_mlp.up_proj",
                "ffn_down_shexp": "mlp.shared_mlp.down_proj",
            },
            experts=EXPERTS,
            config=_hunyuan_moe,
        ),
        "ernie4_5-moe": GgufFamily(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            names={
                **GATE,
                **SHARED,
                "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
            },
            experts=EXPERTS,
            config=_ernie,
        ),
        "minimax-m2": GgufFamily(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
            },
            experts=MIXTRAL_EXPERTS,
            config=_minimax,
            partial=True,
        ),
        "bailingmoe": GgufFamily(
            "DeepseekForCausalLM",
            "deepseek",
            names={**GATE, **SHARED},
            experts=EXPERTS,
            config=_bailing,
            pairs=True,
        ),
        "bailingmoe2": GgufFamily(
            "BailingMoeV2ForCausalLM",
            "bailing_moe_v2",
            names={
                **GATE,
                **SHARED,
                "attn_qkv": "attention.query_key_value",
                "attn_output": "attention.dense",
                "attn_q_norm": "attention.query_layernorm",
                "attn_k_norm": "attention.key_layernorm",
                "exp_probs_b": "mlp.gate.expert_bias",
            },
            whole={"token_embd": "model.word_embeddings"},
            experts=EXPERTS,
            config=_bailing2,
            partial=True,
        ),
    }
)
"""GGUF architecture -> description of its files."""
