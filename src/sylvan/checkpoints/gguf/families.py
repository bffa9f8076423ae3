"""What differs between architectures in GGUF files: names of tensors, and what config.json says.

Each is the inverse of what llama.cpp's converter (`convert_hf_to_gguf.py`) does with that family;
names that it shares with Llama are in `names`.
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
        name: As config.json has it.
        model_type: As config.json has it.
        names: Parts of layers that are called otherwise than Llama's.
        whole: Tensors outside of layers that are.
        experts: What an expert's matrix is called, by part; `{}` is its number.
        config: Fields beyond the common ones.
        pairs: Rows of queries and keys were put in pairs for the rotary kernel.
        raised: 1 was added to the weights of norms.
        layer_norm: Norms subtract the mean, so their epsilon has another key.
        partial: Some columns of a head do not turn.
    """

    name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    whole: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    experts: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    config: Callable[[Keys], Json] = _nothing
    pairs: bool = False
    raised: bool = False
    layer_norm: bool = False
    partial: bool = False


_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEFORE_TOO = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
_PLAIN_UP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GATE = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_CORRECTED = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    "mixtral",
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    config=lambda keys: {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
    },
    pairs=True,
)


def _experts(keys: Keys) -> Json:
    """As the Qwen families spell it."""
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
    return _experts(keys) | more | {"norm_topk_prob": False}


def _grouped(keys: Keys) -> Json:
    """As DeepSeek's families spell it."""
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


def _gemma(keys: Keys) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _query_scale(keys: Keys) -> float:
    """What query_pre_attn_scalar was; the files do not say, llama.cpp knows the large models."""
    if keys.number("block_count") == _LAYERS_OF_27B[keys.architecture]:
        return keys.number("embedding_length") // keys.number("attention.head_count")
    return keys.number("attention.key_length")


def _windows(keys: Keys, every: int) -> list[str]:
    """Kinds of layers where the last of `every` sees everything."""
    layers = range(keys.number("block_count"))
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]


def _gemma2(keys: Keys) -> Json:
    return _gemma(keys) | {
        "query_pre_attn_scalar": _query_scale(keys),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.number("attention.sliding_window", 4096),
        "layer_types": _windows(keys, 2),
    }


def _gemma3(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    every = 6 if window else 1
    return _gemma(keys) | {
        "query_pre_attn_scalar": _query_scale(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": _windows(keys, every),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "rope_theta": float(keys.number("rope.freq_base", 1000000.0)),
    }


def _granite(keys: Keys) -> Json:
    heads = keys.number("attention.head_count")
    usual = (keys.number("embedding_length") // heads) ** -0.5
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", usual),
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
    return _cohere(keys) | {"sliding_window": window, "layer_types": _windows(keys, 4)}


def _exaone4(keys: Keys) -> Json:
    window = keys.number("attention.sliding_window", 0)
    if not window:
        return {}
    return {"sliding_window": window, "layer_types": _windows(keys, 4)}


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


_TWO_NORMS_AFTER = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("LlamaForCausalLM", "llama", pairs=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
        "qwen2moe": GgufFamily(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            names={
                **_GATE,
                "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
                "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                "ffn_up_shexp": "mlp.shared_expert.up_proj",
                "ffn_down_shexp": "mlp.shared_expert.down_proj",
            },
            experts=_EXPERTS,
            config=_qwen2_moe,
        ),
        "qwen3moe": GgufFamily(
            "Qwen3MoeForCausalLM", "qwen3_moe", names=_GATE, experts=_EXPERTS, config=_experts
        ),
        "olmoe": GgufFamily(
            "OlmoeForCausalLM",
            "olmoe",
            names=_GATE,
            experts=_EXPERTS,
            config=_olmoe,
        ),
        "dots1": GgufFamily(
            "Dots1ForCausalLM",
            "dots1",
            names={**_GATE, **_SHARED, **_CORRECTED},
            experts=_EXPERTS,
            config=_grouped,
        ),
        "glm4moe": GgufFamily(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            names={
                **_GATE,
                **_SHARED,
                **_CORRECTED,
                "post_attention_norm": "post_attention_layernorm",
            },
            experts=_EXPERTS,
            config=lambda keys: _grouped(keys) | {"use_qk_norm": keys.has("attn_q_norm.weight")},
            partial=True,
        ),
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
        "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", names=_AFTER),
        "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", names=_AFTER, config=_exaone4),
        "granite": GgufFamily("GraniteForCausalLM", "granite", config=_granite, pairs=True),
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
    }
)
"""GGUF architecture -> what its files hold."""


def family_of(keys: Keys) -> GgufFamily:
    """The family of a file whose architecture is known; Mixtral has Llama's."""
    if keys.architecture == "llama" and keys.number("expert_count", 0):
        return _MIXTRAL
    return FAMILIES[keys.architecture]
