"""GGUF families with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sylvan.checkpoints.gguf.family import (
    EXPERTS,
    GATE,
    NUMBERED,
    POST_ATTENTION,
    SHARED,
    SHARED_ONE,
    GgufFamily,
    Json,
    kinds_by_tensor,
    multipliers,
)
from sylvan.checkpoints.gguf.keys import Keys
from sylvan.checkpoints.gguf.mixtures import qwen_experts

_DELTA = {
    **POST_ATTENTION,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SPLIT_DELTA = {
    **_DELTA,
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_SHORT = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_FINAL = {"output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"}
_PURE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}


def _mixer(name: str) -> Mapping[str, str]:
    """Tensor names of a state-space mixer with this name."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_out": f"{name}.out_proj",
    }


def _first_mixer(name: str) -> Mapping[str, str]:
    return {**_mixer(name), "ssm_x": f"{name}.x_proj", "ssm_dt": f"{name}.dt_proj"}


def _second_mixer(name: str) -> Mapping[str, str]:
    return {**_mixer(name), "ssm_dt": f"{name}.dt_bias", "ssm_norm": f"{name}.norm"}


def _delta(keys: Keys) -> Json:
    values = keys.number("ssm.time_step_rank")
    found = {
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": keys.number("ssm.inner_size") // values,
        "layer_types": kinds_by_tensor(keys, "linear_attention"),
    }
    if not keys.number("expert_count", 0):
        return found
    shared = keys.number("expert_shared_feed_forward_length", 0)
    return qwen_experts(keys) | found | {"shared_expert_intermediate_size": shared}


def _qwen3_next(keys: Keys) -> Json:
    """Older files store the input projections of a delta net joined, as checkpoints do."""
    split = keys.has("ssm_out.weight") and not keys.has("ssm_in.weight")
    return _delta(keys) | ({"sylvan": {"delta_inputs": "split"}} if split else {})


def _lfm2(keys: Keys) -> Json:
    return {
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": keys.number("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": kinds_by_tensor(keys, "conv"),
    }


def _lfm2_moe(keys: Keys) -> Json:
    return _lfm2(keys) | {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "num_dense_layers": keys.number("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.value("expert_weights_norm", True)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "use_expert_bias": keys.has("exp_probs_b.bias"),
    }


def _granite(keys: Keys) -> Json:
    heads, experts = keys.number("ssm.time_step_rank"), keys.number("expert_count", 0)
    kinds = kinds_by_tensor(keys, "mamba")
    shared = keys.number("expert_shared_feed_forward_length", keys.number("feed_forward_length"))
    rotary = keys.value("rope.scaling.finetuned", True)
    return multipliers(keys) | {
        **NUMBERED,
        "layer_types": ["mamba" if kind == "mamba" else "attention" for kind in kinds],
        "position_embedding_type": "rope" if rotary else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.number("expert_used_count", 1),
        "shared_intermediate_size": shared,
        "mamba_n_heads": heads,
        "mamba_d_head": keys.number("ssm.inner_size") // heads,
        "mamba_d_state": keys.number("ssm.state_size"),
        "mamba_n_groups": keys.number("ssm.group_count"),
        "mamba_d_conv": keys.number("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has("ssm_in.bias"),
    }


def _state_space(keys: Keys) -> Json:
    return {
        "state_size": keys.number("ssm.state_size"),
        "conv_kernel": keys.number("ssm.conv_kernel"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "use_conv_bias": keys.has("ssm_conv1d.bias"),
        "use_bias": keys.has("ssm_in.bias"),
    }


def _mamba(keys: Keys) -> Json:
    found = _state_space(keys) | {
        "intermediate_size": keys.number("ssm.inner_size"),
        "time_step_rank": keys.number("ssm.time_step_rank"),
    }
    if keys.value("ssm.dt_b_c_rms", False):
        falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
        found |= falcon | {"mixer_rms_eps": found["layer_norm_epsilon"]}
    return found


def _mamba2(keys: Keys) -> Json:
    heads = keys.number("ssm.time_step_rank")
    return _state_space(keys) | {
        "num_heads": heads,
        "head_dim": keys.number("ssm.inner_size") // heads,
        "n_groups": keys.number("ssm.group_count", 1),
    }


HYBRIDS: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "qwen3next": GgufFamily(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            names={
                **_DELTA,
                **GATE,
                **SHARED_ONE,
                "ssm_ba": "linear_attn.in_proj_ba",
                "ssm_in": "linear_attn.in_proj_qkvz",
            },
            experts=EXPERTS,
            config=_qwen3_next,
            raised=True,
            partial=True,
        ),
        "qwen35": GgufFamily(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            names=_SPLIT_DELTA,
            config=_delta,
            raised=True,
            partial=True,
            tiled=True,
        ),
        "qwen35moe": GgufFamily(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            names={**_SPLIT_DELTA, **GATE, **SHARED_ONE},
            experts=EXPERTS,
            config=_delta,
            raised=True,
            partial=True,
            tiled=True,
        ),
        "lfm2": GgufFamily("Lfm2ForCausalLM", "lfm2", names=_SHORT, whole=_FINAL, config=_lfm2),
        "lfm2moe": GgufFamily(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            names={
                **_SHORT,
                "ffn_gate_inp": "feed_forward.gate",
                "exp_probs_b": "feed_forward.expert_bias",
            },
            whole=_FINAL,
            experts={
                "ffn_gate_exps": "feed_forward.experts.{}.w1",
                "ffn_up_exps": "feed_forward.experts.{}.w3",
                "ffn_down_exps": "feed_forward.experts.{}.w2",
            },
            config=_lfm2_moe,
        ),
        "granitehybrid": GgufFamily(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            names={**GATE, **SHARED, **_second_mixer("mamba")},
            experts=EXPERTS,
            config=_granite,
            pairs=True,
        ),
        "mamba": GgufFamily(
            "MambaForCausalLM",
            "mamba",
            names={**_first_mixer("mixer"), "attn_norm": "norm"},
            whole=_PURE,
            config=_mamba,
        ),
        "mamba2": GgufFamily(
            "Mamba2ForCausalLM",
            "mamba2",
            names={**_second_mixer("mixer"), "attn_norm": "norm"},
            whole=_PURE,
            config=_mamba2,
        ),
    }
)
"""GGUF architecture -> description of its files."""
