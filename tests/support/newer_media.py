"""More tiny checkpoints of multimodal models; see `multimodal`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tests.support.media_families import (
    DELTA,
    IMAGE,
    INTERLEAVED,
    LATENT,
    M_ROPE,
    PATCHES,
    PHI4,
    TEXT,
    TYPES,
    VIDEO,
    VIT,
    VOCAB,
    Family,
    grid,
    heard,
    image,
    made,
    packed_patches,
    pixels,
    placed_patches,
    square_patches,
    sub_images,
    text,
    tiles,
)

PATCHED = VIT | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
"""The vision part of Gemma 4."""

NEWER: Mapping[str, Family] = MappingProxyType(
    {
        "glm-ocr": Family(
            made(
                "GlmOcr",
                text_config=TEXT | {"rope_parameters": M_ROPE},
                vision_config=PATCHES
                | {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "out_hidden_size": 64,
                    "num_heads": 2,
                }
                | {"image_size": 32},
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                image_start_token_id=265,
                image_end_token_id=266,
                video_start_token_id=267,
                video_end_token_id=268,
            ),
            grid,
            types=TYPES,
        ),
        "qianfan-ocr": Family(
            made(
                "QianfanOCR",
                text_config=lambda: text("Qwen3", head_dim=16),
                vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
                image_token_id=IMAGE,
                image_seq_length=4,
            ),
            image(2, 3, 28, 28),
            saved=("language_model.model.encoder.layers.", "language_model.model.layers."),
        ),
        "hyperclovax-vision": Family(
            made(
                "HyperCLOVAXVisionV2",
                text_config=lambda: text("HyperCLOVAX", head_dim=16, embedding_multiplier=3.0),
                vision_config=PATCHES
                | {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "out_hidden_size": 40,
                    "num_heads": 2,
                }
                | {
                    "window_size": 16,
                    "fullatt_block_indexes": [1],
                    "model_type": "qwen2_5_vl_vision",
                },
                image_token_id=IMAGE,
                video_token_id=VIDEO,
            ),
            grid,
        ),
        "kimi-k2.5": Family(
            made(
                "Kimi_K25",
                text_config=lambda: text("DeepseekV3", **LATENT),
                vision_config={
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "patch_size": 7,
                    "pos_emb_height": 6,
                    "pos_emb_width": 6,
                },
                projection_hidden_size=32,
                image_token_id=IMAGE,
                video_token_id=VOCAB,  # behind the vocabulary, as published
                tie_word_embeddings=False,
            ),
            square_patches,
            saved=("language_model.model.blocks.", "language_model.model.layers."),
        ),
        "qwen3.5": Family(
            made(
                "Qwen3_5",
                text_config=DELTA,
                vision_config=PATCHES
                | {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "out_hidden_size": 64,
                    "num_heads": 2,
                }
                | {"num_position_embeddings": 16},
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                vision_start_token_id=265,
                vision_end_token_id=266,
            ),
            grid,
            types=TYPES,
        ),
        "minicpm-v-4.6": Family(
            made(
                "MiniCPMV4_6",
                text_config=DELTA | {"model_type": "qwen3_5_text"},
                vision_config=VIT | {"num_hidden_layers": 3, "image_size": 56},
                insert_layer_id=1,
                image_token_id=IMAGE,
                video_token_id=VIDEO,
            ),
            packed_patches,
            join={"pixel_values": -1},
        ),
        "minicpm-ocr": Family(
            made(
                "MiniCPMOcr",
                text_config=DELTA | {"model_type": "qwen3_5_text"},
                vision_config=VIT | {"num_hidden_layers": 3, "image_size": 56},
                insert_layer_id=1,
                image_token_id=IMAGE,
                video_token_id=VIDEO,
            ),
            packed_patches,
            join={"pixel_values": -1},
        ),
        "deepseek-ocr2": Family(
            made(
                "DeepseekOcr2",
                text_config=TEXT
                | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
                | {"moe_intermediate_size": 48, "n_shared_experts": 1}
                | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
                vision_config={
                    "sam_config": VIT
                    | {"image_size": 64, "patch_size": 4, "mlp_dim": 48, "output_channels": 16}
                    | {
                        "window_size": 4,
                        "global_attn_indexes": [1],
                        "downsample_channels": [24, 32],
                    },
                    "encoder_config": TEXT | {"hidden_size": 32, "num_hidden_layers": 2},
                },
                image_token_id=IMAGE,
            ),
            image(1, 3, 64, 64),
        ),
        "granite-docling": Family(
            made(
                "GraniteDocling",
                text_config=TEXT | {"embedding_multiplier": 3.0},
                vision_config=VIT
                | {"scale_factor": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
                image_token_id=IMAGE,
            ),
            lambda rng: {
                "pixel_values": pixels(rng, 1, 2, 3, 28, 28),
                "pixel_attention_mask": np.ones((1, 2), bool),
            },
        ),
        "phi4-multimodal": Family(
            made("Phi4Multimodal", **TEXT | PHI4),
            sub_images,
            own=("num_img_tokens",),
        ),
        "phi4-multimodal-audio": Family(
            made("Phi4Multimodal", **TEXT | PHI4),
            lambda rng: {
                "audio_input_features": pixels(rng, 1, 64, 16),
                "audio_embed_sizes": np.array([8]),
            },
            kind="audio",
            token=VIDEO,
        ),
        "qwen3-omni": Family(
            made(
                "Qwen3OmniMoeThinker",
                text_config=TEXT
                | {"head_dim": 16, "rope_parameters": INTERLEAVED, "num_experts": 4}
                | {"num_experts_per_tok": 2, "moe_intermediate_size": 48},
                vision_config=PATCHES
                | {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "out_hidden_size": 64,
                    "num_heads": 2,
                }
                | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
                audio_config={
                    "d_model": 32,
                    "encoder_ffn_dim": 48,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "num_mel_bins": 16,
                    "max_source_positions": 50,
                    "n_window": 50,  # code counts with 100 frames
                    "n_window_infer": 100,
                    "downsample_hidden_size": 8,
                    "output_dim": 64,
                },
                audio_token_id=IMAGE,
                image_token_id=265,
                video_token_id=VIDEO,
                vision_start_token_id=266,
                audio_start_token_id=267,
            ),
            heard(16, 200),
            kind="audio",
        ),
        "qwen3-asr": Family(
            made(
                "Qwen3ASR",
                text_config=lambda: text("Qwen3", head_dim=16),
                audio_config={
                    "d_model": 32,
                    "encoder_ffn_dim": 48,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "num_mel_bins": 16,
                    "n_window": 50,
                    "n_window_infer": 100,
                    "downsample_hidden_size": 8,
                    "output_dim": 64,
                },
                audio_token_id=IMAGE,
            ),
            lambda rng: {
                "input_features": pixels(rng, 1, 16, 200),
                "input_features_mask": np.ones((1, 200), np.int64),
            },
            kind="audio",
        ),
        "gemma4": Family(
            made(
                "Gemma4",
                text_config=TEXT
                | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 12}
                | {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
                | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
                | {"global_head_dim": 32},
                vision_config=PATCHED,
                audio_config=None,
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                audio_token_id=265,
            ),
            placed_patches,
            types=TYPES,
            path="transformers",
        ),
        "gemma4-26b": Family(
            made(
                "Gemma4",
                text_config=TEXT
                | {"num_hidden_layers": 4, "sliding_window": 12, "head_dim": 16}
                | {"layer_types": ["sliding_attention", "full_attention"] * 2}
                | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
                | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
                | {"moe_intermediate_size": 48, "attention_k_eq_v": True}
                | {"global_head_dim": 32, "num_global_key_value_heads": 1},
                vision_config=PATCHED,
                audio_config=None,
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                audio_token_id=265,
            ),
            placed_patches,
            types=TYPES,
            path="transformers",
        ),
        "mllama": Family(
            made(
                "Mllama",
                text_config=TEXT | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
                vision_config={
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 3,
                    "num_global_layers": 1,
                    "attention_heads": 2,
                    "image_size": 28,
                    "patch_size": 7,
                    "intermediate_layers_indices": [0, 1],
                    "vision_output_dim": 96,
                },
                image_token_index=VOCAB,  # behind the vocabulary, as published
            ),
            tiles,
            token=VOCAB,
            join=dict.fromkeys(("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), 1),
            cross=True,
        ),
    }
)
