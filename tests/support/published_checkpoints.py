"""Configurations of widely used checkpoints, and their sizes.

Only facts that matter for what is computed; numbers of parameters (in billions) are from their
model cards, or from the sizes of files on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Raw = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Its config.json, and billions of parameters."""

    raw: Raw
    billions: float


def _sizes(text: str) -> Raw:
    """hidden, inner, layers, heads, key heads, vocabulary, positions."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
    return dict(zip(names, map(int, text.split()), strict=True))


def _of(architecture: str, kind: str, billions: float, sizes: str = "", **more: Any) -> Checkpoint:
    raw = {"architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16"}
    return Checkpoint(raw | (_sizes(sizes) if sizes else {}) | more, billions)


def _llama(billions: float, sizes: str, **more: Any) -> Checkpoint:
    plain = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
    return _of("LlamaForCausalLM", "llama", billions, sizes, **plain | more)


def _llama3(factor: float) -> Raw:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_theta": 500_000.0, "rope_scaling": scaling}


def _qwen2(billions: float, sizes: str, *, tied: bool = False) -> Checkpoint:
    more = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    return _of("Qwen2ForCausalLM", "qwen2", billions, sizes, **more)


def _qwen3(billions: float, sizes: str, *, tied: bool = False) -> Checkpoint:
    more = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128, "tie_word_embeddings": tied}
    return _of("Qwen3ForCausalLM", "qwen3", billions, sizes, **more)


def _qwen3_moe(billions: float, sizes: str, inner: int) -> Checkpoint:
    more = {"rope_theta": 1e6, "head_dim": 128, "moe_intermediate_size": inner}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return _of("Qwen3MoeForCausalLM", "qwen3_moe", billions, sizes, **more, **experts)


def _mistral(billions: float, sizes: str, **more: Any) -> Checkpoint:
    plain = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    return _of("MistralForCausalLM", "mistral", billions, sizes, **plain | more)


def _gemma2(billions: float, sizes: str, head: int, scale: int) -> Checkpoint:
    more = {"head_dim": head, "query_pre_attn_scalar": scale, "sliding_window": 4096}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    act = {"hidden_activation": "gelu_pytorch_tanh"}
    return _of("Gemma2ForCausalLM", "gemma2", billions, sizes, **more, **caps, **act)


_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
_V3 = "7168 18432 61 128 128 129280 163840"
_KIMI = {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50_000.0,
}


def _gpt_oss(billions: float, layers: int, experts: int) -> Checkpoint:
    sizes = f"2880 2880 {layers} 64 8 201088 131072"
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4}
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    rest = {
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "attention_bias": True,
        "rope_theta": 150_000.0,
        "rope_scaling": scaling,
        "swiglu_limit": 7.0,
    }
    return _of("GptOssForCausalLM", "gpt_oss", billions, sizes, **more, **rest)


def _chatglm(billions: float, layers: int, vocabulary: int, length: int, ratio: int) -> Checkpoint:
    return _of(
        "ChatGLMModel",
        "chatglm",
        billions,
        num_layers=layers,
        hidden_size=4096,
        ffn_hidden_size=13696,
        kv_channels=128,
        num_attention_heads=32,
        multi_query_attention=True,
        multi_query_group_num=2,
        padded_vocab_size=vocabulary,
        seq_length=length,
        layernorm_epsilon=1e-5,
        rmsnorm=True,
        post_layer_norm=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        apply_residual_connection_post_layernorm=False,
        rope_ratio=ratio,
        tie_word_embeddings=False,
    )


def _bert(billions: float, sizes: str, architecture: str = "BertModel", **more: Any) -> Checkpoint:
    kind = "bert" if architecture == "BertModel" else "xlm-roberta"
    plain = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "torch_dtype": "float32"}
    return _of(architecture, kind, billions, sizes, **plain | {"type_vocab_size": 2} | more)


PUBLISHED: Mapping[str, Checkpoint] = MappingProxyType(
    {
        "meta-llama/Llama-2-7b-chat-hf": _llama(6.738, "4096 11008 32 32 32 32000 4096"),
        "meta-llama/Llama-2-13b-chat-hf": _llama(13.016, "5120 13824 40 40 40 32000 4096"),
        "meta-llama/Llama-3.2-1B-Instruct": _llama(
            1.236, "2048 8192 16 32 8 128256 131072", tie_word_embeddings=True, **_llama3(32.0)
        ),
        "meta-llama/Llama-3.2-3B-Instruct": _llama(
            3.213, "3072 8192 28 24 8 128256 131072", tie_word_embeddings=True, **_llama3(32.0)
        ),
        "meta-llama/Llama-3.1-8B-Instruct": _llama(
            8.030, "4096 14336 32 32 8 128256 131072", **_llama3(8.0)
        ),
        "meta-llama/Llama-3.3-70B-Instruct": _llama(
            70.554, "8192 28672 80 64 8 128256 131072", **_llama3(8.0)
        ),
        "meta-llama/Llama-3.1-405B-Instruct": _llama(
            405.85, "16384 53248 126 128 8 128256 131072", **_llama3(8.0)
        ),
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(1.100, "2048 5632 22 32 4 32000 2048"),
        "01-ai/Yi-6B": _llama(6.061, "4096 11008 32 32 4 64000 4096", rope_theta=5e6),
        "01-ai/Yi-34B": _llama(34.389, "7168 20480 60 56 8 64000 4096", rope_theta=5e6),
        "deepseek-ai/deepseek-llm-7b-chat": _llama(6.910, "4096 11008 30 32 32 102400 4096"),
        "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(
            0.1345, "576 1536 30 9 3 49152 8192", tie_word_embeddings=True, rope_theta=1e5
        ),
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": _llama(
            1.711, "2048 8192 24 32 32 49152 8192", tie_word_embeddings=True, rope_theta=130_000.0
        ),
        "HuggingFaceTB/SmolLM3-3B": _of(
            "SmolLM3ForCausalLM",
            "smollm3",
            3.075,
            "2048 11008 36 16 4 128256 65536",
            rope_theta=5e6,
            no_rope_layer_interval=4,
            tie_word_embeddings=True,
        ),
        "Qwen/Qwen-7B-Chat": _of(
            "QWenLMHeadModel",
            "qwen",
            7.721,
            hidden_size=4096,
            intermediate_size=22016,
            num_hidden_layers=32,
            num_attention_heads=32,
            kv_channels=128,
            vocab_size=151936,
            seq_length=8192,
            max_position_embeddings=32768,
            rotary_emb_base=10000,
            rotary_pct=1.0,
            no_bias=True,
            use_dynamic_ntk=True,
            use_logn_attn=True,
            layer_norm_epsilon=1e-6,
            tie_word_embeddings=False,
        ),
        "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(0.494, "896 4864 24 14 2 151936 32768", tied=True),
        "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(1.544, "1536 8960 28 12 2 151936 32768", tied=True),
        "Qwen/Qwen2.5-3B-Instruct": _qwen2(3.086, "2048 11008 36 16 2 151936 32768", tied=True),
        "Qwen/Qwen2.5-7B-Instruct": _qwen2(7.616, "3584 18944 28 28 4 152064 32768"),
        "Qwen/Qwen2.5-14B-Instruct": _qwen2(14.770, "5120 13824 48 40 8 152064 32768"),
        "Qwen/Qwen2.5-32B-Instruct": _qwen2(32.764, "5120 27648 64 40 8 152064 32768"),
        "Qwen/Qwen2.5-72B-Instruct": _qwen2(72.706, "8192 29568 80 64 8 152064 32768"),
        "Qwen/Qwen3-0.6B": _qwen3(0.596, "1024 3072 28 16 8 151936 40960", tied=True),
        "Qwen/Qwen3-1.7B": _qwen3(1.721, "2048 6144 28 16 8 151936 40960", tied=True),
        "Qwen/Qwen3-4B": _qwen3(4.022, "2560 9728 36 32 8 151936 40960", tied=True),
        "Qwen/Qwen3-8B": _qwen3(8.191, "4096 12288 36 32 8 151936 40960"),
        "Qwen/Qwen3-14B": _qwen3(14.768, "5120 17408 40 40 8 151936 40960"),
        "Qwen/Qwen3-32B": _qwen3(32.762, "5120 25600 64 64 8 151936 40960"),
        "Qwen/Qwen3-30B-A3B": _qwen3_moe(30.532, "2048 6144 48 32 4 151936 40960", 768),
        "Qwen/Qwen3-235B-A22B": _qwen3_moe(235.09, "4096 12288 94 64 4 151936 40960", 1536),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": _of(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            79.67,
            "2048 5120 48 16 2 151936 262144",
            head_dim=256,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            full_attention_interval=4,
            partial_rotary_factor=0.25,
            rope_theta=1e7,
            decoder_sparse_step=1,
        ),
        "Qwen/Qwen1.5-MoE-A2.7B-Chat": _of(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            14.316,
            "2048 5632 24 16 16 151936 8192",
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
            norm_topk_prob=False,
            rope_theta=1e6,
            tie_word_embeddings=False,
        ),
        "mistralai/Mistral-7B-v0.1": _mistral(
            7.242, "4096 14336 32 32 8 32000 32768", rope_theta=10_000.0, sliding_window=4096
        ),
        "mistralai/Mistral-7B-Instruct-v0.3": _mistral(7.248, "4096 14336 32 32 8 32768 32768"),
        "mistralai/Mistral-Nemo-Instruct-2407": _mistral(
            12.248, "5120 14336 40 32 8 131072 131072", head_dim=128
        ),
        "mistralai/Mistral-Small-24B-Instruct-2501": _mistral(
            23.572, "5120 32768 40 32 8 131072 32768", head_dim=128, rope_theta=1e8
        ),
        "mistralai/Mixtral-8x7B-Instruct-v0.1": _of(
            "MixtralForCausalLM",
            "mixtral",
            46.703,
            "4096 14336 32 32 8 32000 32768",
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=1e6,
            rms_norm_eps=1e-5,
        ),
        "mistralai/Mixtral-8x22B-Instruct-v0.1": _of(
            "MixtralForCausalLM",
            "mixtral",
            140.63,
            "6144 16384 56 48 8 32768 65536",
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=1e6,
            rms_norm_eps=1e-5,
        ),
        "google/gemma-2-2b-it": _gemma2(2.614, "2304 9216 26 8 4 256000 8192", 256, 256),
        "google/gemma-2-9b-it": _gemma2(9.242, "3584 14336 42 16 8 256000 8192", 256, 256),
        "google/gemma-2-27b-it": _gemma2(27.227, "4608 36864 46 32 16 256000 8192", 128, 144),
        "google/gemma-3-1b-it": _of(
            "Gemma3ForCausalLM",
            "gemma3_text",
            1.000,
            "1152 6912 26 4 1 262144 32768",
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=10_000.0,
            hidden_activation="gelu_pytorch_tanh",
        ),
        "microsoft/Phi-3-mini-4k-instruct": _of(
            "Phi3ForCausalLM",
            "phi3",
            3.821,
            "3072 8192 32 32 32 32064 4096",
            sliding_window=2047,
            rope_theta=10_000.0,
            rms_norm_eps=1e-5,
        ),
        "microsoft/phi-4": _of(
            "Phi3ForCausalLM",
            "phi3",
            14.660,
            "5120 17920 40 40 10 100352 16384",
            sliding_window=None,
            rope_theta=250_000.0,
            rms_norm_eps=1e-5,
        ),
        "microsoft/phi-2": _of(
            "PhiForCausalLM",
            "phi",
            2.780,
            "2560 10240 32 32 32 51200 2048",
            partial_rotary_factor=0.4,
            hidden_act="gelu_new",
            layer_norm_eps=1e-5,
        ),
        "deepseek-ai/deepseek-moe-16b-chat": _of(
            "DeepseekForCausalLM",
            "deepseek",
            16.376,
            "2048 10944 28 16 16 102400 4096",
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            norm_topk_prob=False,
            scoring_func="softmax",
        ),
        "deepseek-ai/DeepSeek-V2-Lite-Chat": _of(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            15.706,
            "2048 10944 27 16 16 102400 163840",
            **_DEEPSEEK
            | {
                "q_lora_rank": None,
                "moe_intermediate_size": 1408,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 6,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.0,
                "topk_method": "greedy",
                "norm_topk_prob": False,
                "scoring_func": "softmax",
            },
        ),
        "deepseek-ai/DeepSeek-V3": _of(
            "DeepseekV3ForCausalLM", "deepseek_v3", 671.03, _V3, **_DEEPSEEK
        ),
        "deepseek-ai/DeepSeek-V3.2-Exp": _of(
            "DeepseekV32ForCausalLM",
            "deepseek_v32",
            671.88,
            _V3,
            **_DEEPSEEK,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=2048,
        ),
        "deepseek-ai/DeepSeek-V4-Flash": _of(
            "DeepseekV4ForCausalLM",
            "deepseek_v4",
            284.0,
            "4096 2048 43 64 1 129280 1048576",
            moe_intermediate_size=2048,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1024,
            o_lora_rank=1024,
            o_groups=8,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=6,
            num_hash_layers=3,
            compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            hc_mult=4,
            hc_sinkhorn_iters=20,
            rope_theta=10_000.0,
            compress_rope_theta=160_000.0,
            rope_scaling={
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65_536,
            },
        ),
        "moonshotai/Kimi-Linear-48B-A3B-Instruct": _of(
            "KimiLinearForCausalLM",
            "kimi_linear",
            49.1,
            "2304 9216 27 32 32 163840 1048576",
            first_k_dense_replace=1,
            kv_lora_rank=512,
            linear_attn_config={
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            mla_use_nope=True,
            moe_intermediate_size=1024,
            moe_renormalize=True,
            moe_router_activation_func="sigmoid",
            num_expert_group=1,
            num_experts=256,
            num_experts_per_token=8,
            num_shared_experts=1,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-5,
            routed_scaling_factor=2.446,
            topk_group=1,
            v_head_dim=128,
        ),
        "moonshotai/Kimi-K2-Instruct": _of(
            "DeepseekV3ForCausalLM",
            "kimi_k2",
            1026.4,
            "7168 18432 61 64 64 163840 131072",
            **_DEEPSEEK | _KIMI,
        ),
        "openai/gpt-oss-20b": _gpt_oss(20.915, 24, 32),
        "openai/gpt-oss-120b": _gpt_oss(116.83, 36, 128),
        "zai-org/chatglm3-6b": _chatglm(6.244, 28, 65024, 8192, 1),
        "zai-org/glm-4-9b-chat": _chatglm(9.400, 40, 151552, 131072, 500),
        "zai-org/GLM-4.5-Air": _of(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            106.85,
            "4096 10944 46 96 8 151552 131072",
            head_dim=128,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            attention_bias=True,
            use_qk_norm=False,
            partial_rotary_factor=0.5,
            rope_theta=1e6,
        ),
        "MiniMaxAI/MiniMax-M2": _of(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            228.7,
            "3072 1536 62 48 8 200064 196608",
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            rotary_dim=64,
            rope_theta=5e6,
            use_qk_norm=True,
        ),
        "baichuan-inc/Baichuan2-7B-Chat": _of(
            "BaichuanForCausalLM",
            "baichuan",
            7.506,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            vocab_size=125696,
            model_max_length=4096,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
        "internlm/internlm2_5-7b-chat": _of(
            "InternLM2ForCausalLM",
            "internlm2",
            7.738,
            "4096 14336 32 32 8 92544 32768",
            bias=False,
            rope_theta=1e6,
            rms_norm_eps=1e-5,
            hidden_act="silu",
        ),
        "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": _of(
            "ExaoneForCausalLM",
            "exaone",
            7.818,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=102400,
            max_position_embeddings=32768,
            activation_function="silu",
            layer_norm_epsilon=1e-5,
            rope_theta=1e6,
            tie_word_embeddings=False,
        ),
        "CohereLabs/c4ai-command-r7b-12-2024": _of(
            "Cohere2ForCausalLM",
            "cohere2",
            8.028,
            "4096 14336 32 32 8 256000 132096",
            sliding_window=4096,
            sliding_window_pattern=4,
            rope_theta=50_000.0,
            layer_norm_eps=1e-5,
            logit_scale=0.25,
            use_qk_norm=False,
        ),
        "ibm-granite/granite-3.1-8b-instruct": _of(
            "GraniteForCausalLM",
            "granite",
            8.171,
            "4096 12800 40 32 8 49155 131072",
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0078125,
            tie_word_embeddings=True,
            rope_theta=1e7,
        ),
        "openai-community/gpt2": _of(
            "GPT2LMHeadModel",
            "gpt2",
            0.1244,
            n_embd=768,
            n_layer=12,
            n_head=12,
            n_positions=1024,
            n_ctx=1024,
            vocab_size=50257,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            torch_dtype="float32",
        ),
        "facebook/opt-125m": _of(
            "OPTForCausalLM",
            "opt",
            0.1252,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            ffn_dim=3072,
            vocab_size=50272,
            max_position_embeddings=2048,
            word_embed_proj_dim=768,
            do_layer_norm_before=True,
            activation_function="relu",
            torch_dtype="float16",
        ),
        "EleutherAI/pythia-160m": _of(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            0.1623,
            "768 3072 12 12 12 50304 2048",
            rotary_pct=0.25,
            rotary_emb_base=10000,
            use_parallel_residual=True,
            hidden_act="gelu",
            tie_word_embeddings=False,
            torch_dtype="float16",
        ),
        "bigscience/bloom-560m": _of(
            "BloomForCausalLM",
            "bloom",
            0.5592,
            hidden_size=1024,
            n_layer=24,
            n_head=16,
            vocab_size=250880,
            seq_length=2048,
            layer_norm_epsilon=1e-5,
            torch_dtype="float16",
        ),
        "tiiuae/falcon-7b-instruct": _of(
            "FalconForCausalLM",
            "falcon",
            6.922,
            hidden_size=4544,
            num_hidden_layers=32,
            num_attention_heads=71,
            vocab_size=65024,
            multi_query=True,
            parallel_attn=True,
            bias=False,
            alibi=False,
            new_decoder_architecture=False,
            layer_norm_epsilon=1e-5,
        ),
        "bigcode/starcoder2-3b": _of(
            "Starcoder2ForCausalLM",
            "starcoder2",
            3.030,
            "3072 12288 30 24 2 49152 16384",
            use_bias=True,
            sliding_window=4096,
            hidden_act="gelu_pytorch_tanh",
            norm_epsilon=1e-5,
            rope_theta=999_999.4420358813,
            tie_word_embeddings=True,
        ),
        "state-spaces/mamba-130m-hf": _of(
            "MambaForCausalLM",
            "mamba",
            0.1292,
            hidden_size=768,
            num_hidden_layers=24,
            state_size=16,
            intermediate_size=1536,
            conv_kernel=4,
            time_step_rank=48,
            use_bias=False,
            use_conv_bias=True,
            vocab_size=50280,
            torch_dtype="float32",
            tie_word_embeddings=True,
        ),
        "BAAI/bge-small-en-v1.5": _bert(0.0332, "384 1536 12 12 12 30522 512"),
        "BAAI/bge-large-en-v1.5": _bert(0.3341, "1024 4096 24 16 16 30522 512"),
        "sentence-transformers/all-MiniLM-L6-v2": _bert(0.0226, "384 1536 6 12 12 30522 512"),
        "intfloat/multilingual-e5-large": _bert(
            0.5589,
            "1024 4096 24 16 16 250002 514",
            "XLMRobertaModel",
            type_vocab_size=1,
            pad_token_id=1,
            layer_norm_eps=1e-5,
        ),
        "BAAI/bge-m3": _bert(
            0.5668,
            "1024 4096 24 16 16 250002 8194",
            "XLMRobertaModel",
            type_vocab_size=1,
            pad_token_id=1,
            layer_norm_eps=1e-5,
        ),
    }
)
