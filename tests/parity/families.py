"""One tiny random configuration for each architecture that is checked in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
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
SCALED = YARN | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 20,
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


def shape(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    """A config class of transformers in the common shape.

    Each has its own values: configs keep dictionaries, and write into them.
    """
    return lambda: getattr(transformers, name)(**deepcopy(SHAPE | changes))


def old(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    """The same for classes that spell sizes as GPT-2 does."""
    return lambda: getattr(transformers, name)(**deepcopy(OLD_NAMES | changes))


DENSE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "arcee": shape("ArceeConfig"),
        "cohere": shape("CohereConfig"),
        "cohere2": shape("Cohere2Config", sliding_window=12, layer_types=SLIDING),
        "cwm": shape("CwmConfig", sliding_window=12, layer_types=SLIDING, head_dim=16),
        "exaone4": shape("Exaone4Config", sliding_window=12, layer_types=SLIDING),
        "falcon-7b": shape("FalconConfig", multi_query=True, parallel_attn=True),
        "falcon-40b": shape("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
        "falcon-1b": shape("FalconConfig", multi_query=False, parallel_attn=False, bias=True),
        "gemma": shape("GemmaConfig", head_dim=24),
        "gemma2": shape("Gemma2Config", head_dim=24, sliding_window=12, layer_types=SLIDING),
        "gemma3": shape("Gemma3TextConfig", head_dim=24, sliding_window=12, layer_types=SLIDING),
        "glm": shape("GlmConfig", head_dim=16, attention_bias=True),
        "glm4": shape("Glm4Config", head_dim=16),
        "gpt2": old("GPT2Config"),
        "gpt-bigcode": old("GPTBigCodeConfig", multi_query=True),
        "gptj": old("GPTJConfig", rotary_dim=8, tie_word_embeddings=False),
        "gpt-neo": lambda: transformers.GPTNeoConfig(
            **{k: v for k, v in SHAPE.items() if k not in {"num_hidden_layers"}},
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=12,
        ),
        "gpt-neox-japanese": shape("GPTNeoXJapaneseConfig", intermediate_multiple_size=2),
        "codegen": old("CodeGenConfig", rotary_dim=8),
        "bloom": old("BloomConfig", hidden_size=64, n_head=4),
        "mpt": lambda: transformers.MptConfig(
            vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=LAYERS, max_seq_len=256
        ),
        "gemma3-images": lambda: transformers.Gemma3Config(
            text_config=shape(
                "Gemma3TextConfig", head_dim=24, sliding_window=12, layer_types=SLIDING
            )().to_dict(),
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
        ),
        "xglm": shape("XGLMConfig", d_model=64, num_layers=LAYERS, attention_heads=4, ffn_dim=112),
        "gpt-neox": shape("GPTNeoXConfig"),
        "gpt-neox-sequential": shape("GPTNeoXConfig", use_parallel_residual=False),
        "granite": shape(
            "GraniteConfig",
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
        ),
        "helium": shape("HeliumConfig", head_dim=16),
        "ministral": shape("MinistralConfig", sliding_window=12, layer_types=SLIDING, head_dim=16),
        "nemotron": shape("NemotronConfig"),
        "olmo2": shape("Olmo2Config"),
        "olmo3": shape("Olmo3Config", sliding_window=12, layer_types=SLIDING),
        "opt": shape("OPTConfig", ffn_dim=112, word_embed_proj_dim=64),
        "phi": shape("PhiConfig"),
        "phi3": shape("Phi3Config", sliding_window=20),
        "phi4-longrope": shape(
            "Phi3Config", rope_parameters=LONGROPE, original_max_position_embeddings=64
        ),
        "seed-oss": shape("SeedOssConfig", head_dim=16, attention_out_bias=True),
        "smollm3": shape("SmolLM3Config", no_rope_layers=[1, 0, 1]),
        "stablelm": shape("StableLmConfig", use_qkv_bias=True),
        "stablelm-parallel": shape("StableLmConfig", use_parallel_residual=True),
        "starcoder2": shape("Starcoder2Config", sliding_window=20),
    }
)

EXPERT: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "deepseek-v2": shape(
            "DeepseekV2Config",
            **LATENT | {"q_lora_rank": None, "head_dim": 8},
            topk_method="group_limited_greedy",
        ),
        "deepseek-v3": shape("DeepseekV3Config", **LATENT, rope_parameters=YARN),
        "dots1": shape("Dots1Config", **SHARED, first_k_dense_replace=1, head_dim=16),
        "glm4-moe": shape("Glm4MoeConfig", **SHARED, use_qk_norm=True, head_dim=16),
        "gpt-oss": shape("GptOssConfig", **EXPERTS, head_dim=16, sliding_window=12),
        "llama4": shape(
            "Llama4TextConfig",
            **EXPERTS | {"num_experts_per_tok": 1},
            intermediate_size_mlp=96,
            interleave_moe_layer_step=2,
            attention_chunk_size=24,
            floor_scale=20,
            no_rope_layers=[1, 1, 0],
            head_dim=16,
        ),
        "hunyuan-moe": shape(
            "HunYuanMoEV1Config", head_dim=16, num_experts=8, moe_topk=2, num_hidden_layers=2
        ),
        "mixtral": shape("MixtralConfig", **EXPERTS),
        "olmoe": shape("OlmoeConfig", **EXPERTS),
        "phimoe": shape("PhimoeConfig", **EXPERTS, attention_bias=True, lm_head_bias=True),
        "qwen2-moe": shape(
            "Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2
        ),
        "qwen3-moe": shape("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=True, head_dim=16),
    }
)
FALLBACK: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "cohere-qk-norm": shape("CohereConfig", use_qk_norm=True),
        "persimmon": shape("PersimmonConfig"),
        "roberta-decoder": shape("RobertaConfig", is_decoder=True),
    }
)
FAMILIES = {**DENSE, **EXPERT, **FALLBACK}
