"""Families that are compared only for the table, and those whose layers keep states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import transformers
from transformers import PretrainedConfig

from tests.parity.checkpoints import SHAPE, VOCAB
from tests.parity.families import (
    EXPERTS,
    FAMILIES,
    LATENT,
    LAYERS,
    SCALED,
    SHARED,
    SLIDING,
    YARN,
    old,
    shape,
)

RARE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "apertus": shape("ApertusConfig"),
        "apertus1p5-text": shape("Apertus1p5TextConfig"),
        "aria-text": shape("AriaTextConfig"),
        "ernie4-5": shape("Ernie4_5Config"),
        "ernie4-5-moe": shape("Ernie4_5_MoeConfig", **EXPERTS),
        "exaone-moe": shape("ExaoneMoeConfig", **SHARED),
        "flex-olmo": shape("FlexOlmoConfig", **EXPERTS),
        "hunyuan": shape("HunYuanDenseV1Config", head_dim=16),
        "cohere2-moe": shape("Cohere2MoeConfig", **EXPERTS),
        "glm4-moe-lite": shape("Glm4MoeLiteConfig", **LATENT),
        "granite-swa": shape("GraniteSWAConfig", sliding_window=12, layer_types=SLIDING),
        "granitemoeshared": shape("GraniteMoeSharedConfig", **EXPERTS),
        "mellum": shape("MellumConfig", **EXPERTS, head_dim=16),
        "ministral3": shape("Ministral3Config", head_dim=16, rope_parameters=SCALED),
        "biogpt": shape("BioGptConfig"),
        "granitemoe": shape("GraniteMoeConfig", **EXPERTS),
        "minicpm3": shape("MiniCPM3Config", **LATENT),
        "olmo": shape("OlmoConfig"),
        "olmo-clipped": shape("OlmoConfig", clip_qkv=0.5),
        "solar-open": shape("SolarOpenConfig", **SHARED, head_dim=16),
        "modernbert-decoder": shape("ModernBertDecoderConfig"),
        "youtu": shape("YoutuConfig", **LATENT),
        "hyperclovax": shape("HyperCLOVAXConfig"),
        "jais2": shape("Jais2Config"),
        "minimax-m2": shape("MiniMaxM2Config", **EXPERTS, head_dim=16),
        "nanochat": shape("NanoChatConfig"),
        "vaultgemma": shape("VaultGemmaConfig", head_dim=24),
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
        "bailing-hybrid": shape("BailingHybridConfig", **LATENT, layer_types=DELTA["layer_types"]),
        "bamba": shape("BambaConfig", **MAMBA2, attn_layer_indices=[1]),
        "falcon-h1": shape("FalconH1Config", **MAMBA2, mamba_d_ssm=128),
        "falcon-mamba": shape("FalconMambaConfig", state_size=8),
        "granite4": shape(
            "GraniteMoeHybridConfig",
            **MAMBA2 | EXPERTS,
            layer_types=DELTA["layer_types"],
            shared_intermediate_size=48,
        ),
        "jamba": shape(
            "JambaConfig",
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
        "kimi-linear": shape(
            "KimiLinearConfig",
            **LATENT,
            layer_types=DELTA["layer_types"],
            linear_head_dim=16,
            linear_num_heads=4,
        ),
        "lara-mini": shape("LaraMiniConfig", **DELTA),
        "lfm2": shape("Lfm2Config", layer_types=CONV),
        "lfm2-moe": shape("Lfm2MoeConfig", **EXPERTS, layer_types=CONV, num_dense_layers=1),
        "lfm3": shape("Lfm3Config", layer_types=CONV),
        "mamba": shape("MambaConfig", state_size=8),
        "mamba2": shape(
            "Mamba2Config",
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            expand=2,
            chunk_size=8,
        ),
        "minimax": shape(
            "MiniMaxConfig",
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=16,
            block_size=8,
            layer_types=DELTA["layer_types"],
            linear_attn_alpha_factor=1.5,
            linear_attn_beta_factor=0.7,
            mlp_alpha_factor=1.2,
        ),
        "nemotron-h": shape(
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
        "olmo-hybrid": shape("OlmoHybridConfig", **DELTA),
        "recurrent-gemma": shape("RecurrentGemmaConfig", attention_window_size=12),
        "rwkv": lambda: transformers.RwkvConfig(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, context_length=256
        ),
        "qwen3-next": shape("Qwen3NextConfig", **DELTA | QWEN),
        "qwen3.5": shape("Qwen3_5TextConfig", **DELTA, initializer_range=0.08),
        "qwen3.5-moe": shape("Qwen3_5MoeTextConfig", **DELTA | QWEN),
        "zamba2": shape(
            "Zamba2Config",
            mamba_d_state=16,
            mamba_ngroups=2,
            n_mamba_heads=8,
            chunk_size=8,
            num_key_value_heads=4,
            layers_block_type=["linear_attention", "hybrid", "hybrid"],
            use_shared_attention_adapter=True,
            adapter_rank=8,
            use_mem_rope=True,
            initializer_range=0.08,
        ),
        "zamba": shape(
            "ZambaConfig",
            mamba_d_state=8,
            mamba_dt_rank=6,
            n_mamba_heads=2,
            layers_block_type=["linear_attention", "hybrid", "hybrid"],
        ),
        "zaya": shape("ZayaConfig"),
    }
)
"""Some layers keep a state; the default test run takes a sample of them."""
STEPPING = frozenset({"zamba2"})
"""Transformers computes a token of an answer otherwise than one of a prompt (6e-5 in float64)."""
GEMMA_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
HEAVY = "heavily_compressed_attention"
INDEX = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 24, "head_dim": 8}


def _longcat() -> PretrainedConfig:
    sizes = {n: v for n, v in SHAPE.items() if n not in ("num_hidden_layers", "intermediate_size")}
    latent = {n: v for n, v in LATENT.items() if "rank" in n or "head" in n}
    return transformers.LongcatFlashConfig(
        **sizes | latent,
        head_dim=8,
        num_layers=2,
        ffn_hidden_size=112,
        moe_topk=3,
        n_routed_experts=6,
        zero_expert_num=3,
        expert_ffn_hidden_size=24,
        routed_scaling_factor=2.0,
    )


MORE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "afmoe": shape(
            "AfmoeConfig",
            **EXPERTS,
            num_shared_experts=1,
            num_dense_layers=1,
            head_dim=16,
            sliding_window=12,
        ),
        "axk1": shape("AXK1Config", **LATENT),
        "bitnet": shape("BitNetConfig"),
        "ctrl": old("CTRLConfig", dff=112),
        "flint": shape("FlintConfig"),
        "gemma4": shape(
            "Gemma4TextConfig",
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            sliding_window=12,
            layer_types=SLIDING,
        ),
        "gemma3n": shape(
            "Gemma3nTextConfig",
            **GEMMA_SHARED,
            activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
            altup_num_inputs=3,
            laurel_rank=8,
            intermediate_size=[112] * 4,
        ),
        "gemma4-experts": shape(
            "Gemma4TextConfig",
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
            sliding_window=12,
            layer_types=SLIDING,
        ),
        "gemma4-shared": shape(
            "Gemma4TextConfig", **GEMMA_SHARED, global_head_dim=32, use_double_wide_mlp=True
        ),
        "deepseek-v4": shape(
            "DeepseekV4Config",
            **{name: size for name, size in EXPERTS.items() if name != "num_experts"},
            head_dim=32,
            partial_rotary_factor=0.25,
            q_lora_rank=24,
            sliding_window=12,
            num_key_value_heads=1,
            layer_types=["sliding_attention", "compressed_sparse_attention", HEAVY],
            compress_rates={"compressed_sparse_attention": 4, HEAVY: 32},
            mlp_layer_types=["hash_moe", "moe", "moe"],
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=8,
            index_head_dim=16,
            index_topk=6,
            rope_scaling=YARN,
        ),
        "deepseek-v32": shape("DeepseekV32Config", **LATENT | INDEX),
        "glm-moe-dsa": shape(
            "GlmMoeDsaConfig", **LATENT | INDEX, indexer_types=["full", "shared", "full"]
        ),
        "jetmoe": shape("JetMoeConfig", num_local_experts=4, num_experts_per_tok=2, kv_channels=16),
        "longcat-flash": _longcat,
        "mimo-v2-flash": shape(
            "MiMoV2FlashConfig",
            **EXPERTS,
            head_dim=16,
            v_head_dim=12,
            n_group=4,
            topk_group=2,
            sliding_window=12,
            layer_types=SLIDING,
            mlp_layer_types=["dense", "sparse", "sparse"],
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
                for kind, base in (("full_attention", 5e6), ("sliding_attention", 1e4))
            },
        ),
        "dbrx": lambda: transformers.DbrxConfig(
            vocab_size=VOCAB,
            d_model=64,
            n_heads=4,
            n_layers=LAYERS,
            max_seq_len=256,
            attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0},
            ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
            initializer_range=0.15,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "dory": lambda: transformers.DoryConfig(**SHAPE),
        "hrm-text": shape("HrmTextConfig"),
        "openai-gpt": old("OpenAIGPTConfig"),
        "granitemoe-swa": shape(
            "GraniteMoeSWAConfig", **EXPERTS, sliding_window=12, layer_types=SLIDING
        ),
        "hyv3": shape("HYV3Config", **EXPERTS, head_dim=16),
        "beam": shape("BeamConfig", **SHARED, head_dim=16, sliding_window=12, layer_types=SLIDING),
        "diffllama": shape("DiffLlamaConfig"),
        "kolibri1": shape(
            "Kolibri1Config",
            **QWEN,
            head_dim=16,
            sliding_window=13,
            layer_types=SLIDING,
        ),
        "laguna": shape(
            "LagunaConfig", **QWEN, head_dim=16, sliding_window=12, layer_types=SLIDING
        ),
        "minimax-m3": shape(
            "MiniMaxM3VLTextConfig",
            **EXPERTS,
            head_dim=16,
            rotary_dim=8,
            dense_intermediate_size=112,
            shared_intermediate_size=48,
        ),
        "gemma4-unified": shape(
            "Gemma4UnifiedTextConfig",
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            sliding_window=12,
            layer_types=SLIDING,
        ),
    }
)
BOTH_HALVES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 112,
    "max_position_embeddings": 256,
    "init_std": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    "is_encoder_decoder": False,
}


def _half(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    """The decoder of a model that has an encoder too, by itself."""
    return lambda: getattr(transformers, name)(**BOTH_HALVES | changes)


ALONE: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "bart": _half("BartConfig"),
        "blenderbot": _half("BlenderbotConfig"),
        "blenderbot-small": _half("BlenderbotSmallConfig"),
        "marian": _half("MarianConfig"),
        "mbart": _half("MBartConfig"),
        "mvp": _half("MvpConfig"),
        "trocr": _half("TrOCRConfig"),
        "megatron-bert-decoder": shape("MegatronBertConfig", is_decoder=True),
        "rembert-decoder": shape(
            "RemBertConfig", is_decoder=True, input_embedding_size=32, output_embedding_size=48
        ),
        "roformer-decoder": shape("RoFormerConfig", is_decoder=True, embedding_size=32),
        "pegasus": _half("PegasusConfig"),
        "plbart": _half("PLBartConfig"),
        "bert-decoder": shape("BertConfig", is_decoder=True),
        "bert-generation": shape("BertGenerationConfig", is_decoder=True),
        "camembert-decoder": shape("CamembertConfig", is_decoder=True),
        "data2vec-decoder": shape("Data2VecTextConfig", is_decoder=True),
        "electra-decoder": shape("ElectraConfig", is_decoder=True, embedding_size=32),
        "ernie-decoder": shape("ErnieConfig", is_decoder=True),
        "roberta-prelayernorm": shape("RobertaPreLayerNormConfig", is_decoder=True),
        "roc-bert-decoder": shape(
            "RoCBertConfig",
            is_decoder=True,
            pronunciation_vocab_size=20,
            shape_vocab_size=20,
            pronunciation_embed_dim=16,
            shape_embed_dim=16,
        ),
        "xlm-roberta-decoder": shape("XLMRobertaConfig", is_decoder=True),
        "xlm-roberta-xl": shape("XLMRobertaXLConfig", is_decoder=True),
    }
)
"""Standalone decoders of encoder-decoder models, and encoders with causal attention."""
RARE = MappingProxyType({**RARE, **RECURRENT, **MORE, **ALONE})

ALL = {**FAMILIES, **RARE}
