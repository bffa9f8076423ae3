"""One tiny random configuration for each architecture that is checked in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import transformers
from transformers import PretrainedConfig

from tests.parity.checkpoints import SHAPE, VOCAB

LAYERS = SHAPE["num_hidden_layers"]
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts": 8,
}
SHARED = EXPERTS | {"n_shared_experts": 1, "n_group": 4, "topk_group": 2}
LATENT = SHARED | {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0],
    "factor": 4.0,
    "partial_rotary_factor": 0.5,
}
OLD_NAMES = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}


def _shape(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    """A config class of transformers in the common shape."""
    return lambda: getattr(transformers, name)(**SHAPE | changes)


def _old(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    """The same for classes that spell sizes as GPT-2 does."""
    return lambda: getattr(transformers, name)(**OLD_NAMES | changes)


DENSE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "arcee": _shape("ArceeConfig"),
        "cohere": _shape("CohereConfig"),
        "cohere2": _shape("Cohere2Config", sliding_window=12, layer_types=SLIDING),
        "cwm": _shape("CwmConfig", sliding_window=12, layer_types=SLIDING, head_dim=16),
        "exaone4": _shape("Exaone4Config", sliding_window=12, layer_types=SLIDING),
        "falcon-7b": _shape("FalconConfig", multi_query=True, parallel_attn=True),
        "falcon-40b": _shape("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
        "falcon-1b": _shape("FalconConfig", multi_query=False, parallel_attn=False, bias=True),
        "gemma": _shape("GemmaConfig", head_dim=24),
        "gemma2": _shape("Gemma2Config", head_dim=24, sliding_window=12, layer_types=SLIDING),
        "gemma3": _shape("Gemma3TextConfig", head_dim=24, sliding_window=12, layer_types=SLIDING),
        "glm": _shape("GlmConfig", head_dim=16, attention_bias=True),
        "glm4": _shape("Glm4Config", head_dim=16),
        "gpt2": _old("GPT2Config"),
        "gpt-bigcode": _old("GPTBigCodeConfig", multi_query=True),
        "gptj": _old("GPTJConfig", rotary_dim=8, tie_word_embeddings=False),
        "gpt-neox": _shape("GPTNeoXConfig"),
        "gpt-neox-sequential": _shape("GPTNeoXConfig", use_parallel_residual=False),
        "granite": _shape(
            "GraniteConfig",
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
        ),
        "helium": _shape("HeliumConfig", head_dim=16),
        "ministral": _shape("MinistralConfig", sliding_window=12, layer_types=SLIDING, head_dim=16),
        "nemotron": _shape("NemotronConfig"),
        "olmo2": _shape("Olmo2Config"),
        "olmo3": _shape("Olmo3Config", sliding_window=12, layer_types=SLIDING),
        "opt": _shape("OPTConfig", ffn_dim=112, word_embed_proj_dim=64),
        "phi": _shape("PhiConfig"),
        "phi3": _shape("Phi3Config", sliding_window=20),
        "phi4-longrope": _shape(
            "Phi3Config", rope_parameters=LONGROPE, original_max_position_embeddings=64
        ),
        "seed-oss": _shape("SeedOssConfig", head_dim=16, attention_out_bias=True),
        "smollm3": _shape("SmolLM3Config", no_rope_layers=[1, 0, 1]),
        "stablelm": _shape("StableLmConfig", use_qkv_bias=True),
        "stablelm-parallel": _shape("StableLmConfig", use_parallel_residual=True),
        "starcoder2": _shape("Starcoder2Config", sliding_window=20),
    }
)

EXPERT: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "deepseek-v2": _shape(
            "DeepseekV2Config",
            **LATENT | {"q_lora_rank": None, "head_dim": 8},
            topk_method="group_limited_greedy",
        ),
        "deepseek-v3": _shape("DeepseekV3Config", **LATENT, rope_parameters=YARN),
        "dots1": _shape("Dots1Config", **SHARED, first_k_dense_replace=1, head_dim=16),
        "glm4-moe": _shape("Glm4MoeConfig", **SHARED, use_qk_norm=True, head_dim=16),
        "gpt-oss": _shape("GptOssConfig", **EXPERTS, head_dim=16, sliding_window=12),
        "mixtral": _shape("MixtralConfig", **EXPERTS),
        "olmoe": _shape("OlmoeConfig", **EXPERTS),
        "phimoe": _shape("PhimoeConfig", **EXPERTS, attention_bias=True, lm_head_bias=True),
        "qwen2-moe": _shape(
            "Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2
        ),
        "qwen3-moe": _shape("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=True, head_dim=16),
    }
)
FALLBACK: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "biogpt": _shape("BioGptConfig"),
        "cohere-qk-norm": _shape("CohereConfig", use_qk_norm=True),
        "granitemoe": _shape("GraniteMoeConfig", **EXPERTS),
        "minicpm3": _shape("MiniCPM3Config", **LATENT),
        "olmo": _shape("OlmoConfig"),
        "solar-open": _shape("SolarOpenConfig", **SHARED, head_dim=16),
    }
)
FAMILIES = {**DENSE, **EXPERT, **FALLBACK}
RARE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "apertus": _shape("ApertusConfig"),
        "aria-text": _shape("AriaTextConfig"),
        "ernie4-5": _shape("Ernie4_5Config"),
        "ernie4-5-moe": _shape("Ernie4_5_MoeConfig", **EXPERTS),
        "exaone-moe": _shape("ExaoneMoeConfig", **SHARED),
        "flex-olmo": _shape("FlexOlmoConfig", **EXPERTS),
        "hunyuan": _shape("HunYuanDenseV1Config", head_dim=16),
        "cohere2-moe": _shape("Cohere2MoeConfig", **EXPERTS),
        "glm4-moe-lite": _shape("Glm4MoeLiteConfig", **LATENT),
        "granite-swa": _shape("GraniteSWAConfig", sliding_window=12, layer_types=SLIDING),
        "granitemoeshared": _shape("GraniteMoeSharedConfig", **EXPERTS),
        "mellum": _shape("MellumConfig", **EXPERTS, head_dim=16),
        "ministral3": _shape("Ministral3Config", head_dim=16),
        "modernbert-decoder": _shape("ModernBertDecoderConfig"),
        "youtu": _shape("YoutuConfig", **LATENT),
        "hyperclovax": _shape("HyperCLOVAXConfig"),
        "jais2": _shape("Jais2Config"),
        "minimax-m2": _shape("MiniMaxM2Config", **EXPERTS, head_dim=16),
        "nanochat": _shape("NanoChatConfig"),
        "persimmon": _shape("PersimmonConfig"),
        "vaultgemma": _shape("VaultGemmaConfig", head_dim=24),
    }
)
"""Compared only for the table: they are served as others are."""


MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONV = ["conv", "full_attention", "conv"]
QWEN = EXPERTS | {"shared_expert_intermediate_size": 24}
RECURRENT: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "bailing-hybrid": _shape("BailingHybridConfig", **LATENT, layer_types=DELTA["layer_types"]),
        "bamba": _shape("BambaConfig", **MAMBA2, attn_layer_indices=[1]),
        "falcon-h1": _shape("FalconH1Config", **MAMBA2, mamba_d_ssm=128),
        "falcon-mamba": _shape("FalconMambaConfig", state_size=8),
        "granite4": _shape(
            "GraniteMoeHybridConfig",
            **MAMBA2 | EXPERTS,
            layer_types=DELTA["layer_types"],
            shared_intermediate_size=48,
        ),
        "jamba": _shape(
            "JambaConfig",
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
        "kimi-linear": _shape("KimiLinearConfig", **LATENT, layer_types=DELTA["layer_types"]),
        "lfm2": _shape("Lfm2Config", layer_types=CONV),
        "lfm2-moe": _shape("Lfm2MoeConfig", **EXPERTS, layer_types=CONV, num_dense_layers=1),
        "lfm3": _shape("Lfm3Config", layer_types=CONV),
        "mamba": _shape("MambaConfig", state_size=8),
        "mamba2": _shape(
            "Mamba2Config",
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            expand=2,
            chunk_size=8,
        ),
        "nemotron-h": _shape(
            "NemotronHConfig",
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=8,
            layers_block_type=["mamba", "attention", "mlp"],
            head_dim=16,
            initializer_range=0.08,
        ),
        "olmo-hybrid": _shape("OlmoHybridConfig", **DELTA),
        "qwen3-next": _shape("Qwen3NextConfig", **DELTA | QWEN),
        "qwen3.5": _shape("Qwen3_5TextConfig", **DELTA, initializer_range=0.08),
        "qwen3.5-moe": _shape("Qwen3_5MoeTextConfig", **DELTA | QWEN),
        "zaya": _shape("ZayaConfig"),
    }
)
"""Some layers keep a state; the default test run takes a sample of them."""
MORE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "afmoe": _shape(
            "AfmoeConfig",
            **EXPERTS,
            num_shared_experts=1,
            num_dense_layers=1,
            head_dim=16,
            sliding_window=12,
        ),
        "axk1": _shape("AXK1Config", **LATENT),
        "bitnet": _shape("BitNetConfig"),
        "ctrl": _old("CTRLConfig", dff=112),
        "flint": _shape("FlintConfig"),
        "gemma4": _shape(
            "Gemma4TextConfig",
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            sliding_window=12,
            layer_types=SLIDING,
        ),
        "granitemoe-swa": _shape(
            "GraniteMoeSWAConfig", **EXPERTS, sliding_window=12, layer_types=SLIDING
        ),
        "hyv3": _shape("HYV3Config", **EXPERTS, head_dim=16),
    }
)
RARE = MappingProxyType({**RARE, **RECURRENT, **MORE})

ALL = {**FAMILIES, **RARE}
