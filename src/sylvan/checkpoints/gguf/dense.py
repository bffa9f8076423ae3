"""GGUF families without experts and recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sylvan.checkpoints.gguf.family import (
    POST_ATTENTION,
    GgufFamily,
    Json,
    kinds_by_pattern,
    multipliers,
)
from sylvan.checkpoints.gguf.keys import Keys

_AFTER = {**POST_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"}
_BEFORE_TOO = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
_PLAIN_UP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS_AFTER = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _gemma(keys: Keys) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scale(keys: Keys) -> float:
    """query_pre_attn_scalar: files lack it, and llama.cpp hard-codes it for the large models."""
    if keys.number("block_count") == _LAYERS_OF_27B[keys.architecture]:
        return keys.number("embedding_length") // keys.number("attention.head_count")
    return keys.number("attention.key_length")


def _gemma2(keys: Keys) -> Json:
    return _gemma(keys) | {
        "query_pre_attn_scalar": _query_scale(keys),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.number("attention.sliding_window", 4096),
        "layer_types": kinds_by_pattern(keys, 2),
    }


def _gemma3(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    every = 6 if window else 1
    return _gemma(keys) | {
        "query_pre_attn_scalar": _query_scale(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": kinds_by_pattern(keys, every),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "rope_theta": float(keys.number("rope.freq_base", 1000000.0)),
    }


def _minicpm(keys: Keys) -> Json:
    depth = keys.number("block_count") ** 0.5
    hidden = keys.number("embedding_length")
    return {
        "scale_emb": keys.number("embedding_scale", 12.0),
        "scale_depth": keys.number("residual_scale", 1.4 / depth) * depth,
        "dim_model_base": hidden / keys.number("logit_scale", hidden / 256),
    }


def _cohere(keys: Keys) -> Json:
    return {"logit_scale": keys.number("logit_scale"), "use_qk_norm": False}


def _cohere2(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 4096)
    return _cohere(keys) | {"sliding_window": window, "layer_types": kinds_by_pattern(keys, 4)}


def _exaone4(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    if not window:
        return {}
    return {"sliding_window": window, "layer_types": kinds_by_pattern(keys, 4)}


def _stablelm(keys: Keys) -> Json:
    return {
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "use_parallel_residual": bool(keys.value("use_parallel_residual", False)),
    }


def _phi3(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    longest = keys.number("context_length")
    return {
        "sliding_window": window if 0 < window < longest else None,
        "original_max_position_embeddings": keys.number(
            "rope.scaling.original_context_length", longest
        ),
    }


def _nemotron(keys: Keys) -> Json:
    return {"hidden_act": "relu2", "norm_eps": keys.number("attention.layer_norm_epsilon", 1e-5)}


def _bias(keys: Keys) -> Json:
    return {"use_bias": keys.has("blk.0.attn_q.bias"), "hidden_act": "gelu_pytorch_tanh"}


def _smollm3(keys: Keys) -> Json:
    return {"no_rope_layer_interval": 4}


def _seed_oss(keys: Keys) -> Json:
    return {"attention_out_bias": keys.has("blk.0.attn_output.bias")}


def _olmo3(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window")
    marks = keys.value("attention.sliding_window_pattern")
    kinds = kinds_by_pattern(keys, 4)
    if isinstance(marks, list):
        kinds = ["sliding_attention" if mark else "full_attention" for mark in marks]
    return {"sliding_window": window, "layer_types": kinds}


def _olmo3_scaling(keys: Keys) -> Json:
    """The file's `attn_factor` is the whole factor of cosines and sines."""
    factor = keys.number("rope.scaling.attn_factor", 0.0)
    return {"attention_factor": factor} if factor else {}


def _ministral3(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    return {"sliding_window": window or None}


def _temperature(keys: Keys) -> Json:
    beta = keys.number("attention.temperature_scale", 0.0)
    return {"llama_4_scaling_beta": beta} if beta else {}


def _phi2(keys: Keys) -> Json:
    return {
        "hidden_act": "gelu_new",
        "num_key_value_heads": keys.number("attention.head_count"),
        "tie_word_embeddings": False,
    }


OLMO_3 = GgufFamily(
    "Olmo3ForCausalLM", "olmo3", names=_AFTER, config=_olmo3, scaling=_olmo3_scaling
)
"""Files use the name `olmo2` for it, too; the windows distinguish them."""

DENSE: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("LlamaForCausalLM", "llama", pairs=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
        "gemma": GgufFamily("GemmaForCausalLM", "gemma", config=_gemma, raised=True),
        "gemma2": GgufFamily(
            "Gemma2ForCausalLM", "gemma2", names=_BEFORE_TOO, config=_gemma2, raised=True
        ),
        "gemma3": GgufFamily(
            "Gemma3ForCausalLM", "gemma3_text", names=_BEFORE_TOO, config=_gemma3, raised=True
        ),
        "phi3": GgufFamily(
            "Phi3ForCausalLM",
            "phi3",
            names={**_FUSED_UP, "attn_qkv": "self_attn.qkv_proj"},
            config=_phi3,
            partial=True,
        ),
        "starcoder2": GgufFamily(
            "Starcoder2ForCausalLM",
            "starcoder2",
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            config=_bias,
            layer_norm=True,
        ),
        "stablelm": GgufFamily(
            "StableLmForCausalLM", "stablelm", config=_stablelm, layer_norm=True, partial=True
        ),
        "nemotron": GgufFamily(
            "NemotronForCausalLM",
            "nemotron",
            names=_PLAIN_UP,
            config=_nemotron,
            raised=True,
            layer_norm=True,
            partial=True,
        ),
        "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", names=_AFTER, config=_exaone4),
        "granite": GgufFamily("GraniteForCausalLM", "granite", config=multipliers, pairs=True),
        "minicpm": GgufFamily("MiniCPMForCausalLM", "minicpm", config=_minicpm, pairs=True),
        "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", config=_smollm3, pairs=True),
        "arcee": GgufFamily(
            "ArceeForCausalLM",
            "arcee",
            names=_PLAIN_UP,
            config=lambda keys: {"hidden_act": "relu2"},
            pairs=True,
        ),
        "ernie4_5": GgufFamily(
            "Ernie4_5ForCausalLM",
            "ernie4_5",
            config=lambda keys: {"use_bias": keys.has("blk.0.attn_q.bias")},
        ),
        "seed_oss": GgufFamily(
            "SeedOssForCausalLM",
            "seed_oss",
            names={"post_attention_norm": "post_attention_layernorm"},
            config=_seed_oss,
        ),
        "glm4": GgufFamily(
            "Glm4ForCausalLM",
            "glm4",
            names={**_FUSED_UP, **_TWO_NORMS_AFTER},
            partial=True,
        ),
        "command-r": GgufFamily("CohereForCausalLM", "cohere", config=_cohere, layer_norm=True),
        "cohere2": GgufFamily(
            "Cohere2ForCausalLM", "cohere2", config=_cohere2, layer_norm=True, partial=True
        ),
        "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", names=_AFTER),
        "mistral3": GgufFamily(
            "Ministral3ForCausalLM",
            "ministral3",
            config=_ministral3,
            scaling=_temperature,
            pairs=True,
            mscale=1.0,
        ),
        "qwen2vl": GgufFamily("Qwen2ForCausalLM", "qwen2"),
        "qwen3vl": GgufFamily("Qwen3ForCausalLM", "qwen3"),
        "exaone": GgufFamily("LlamaForCausalLM", "llama"),
        "internlm2": GgufFamily("LlamaForCausalLM", "llama", pairs=True),
        "hunyuan-dense": GgufFamily(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            names={
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
        "phi2": GgufFamily(
            "PhiForCausalLM",
            "phi",
            names={
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            whole={"output_norm": "model.final_layernorm"},
            config=_phi2,
            layer_norm=True,
            partial=True,
        ),
    }
)
"""GGUF architecture -> description of its files."""
