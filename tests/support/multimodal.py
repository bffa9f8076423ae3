"""Tiny checkpoints of multimodal models, as transformers writes them, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.media_families import (
    IMAGE,
    INTERLEAVED,
    M_ROPE,
    PATCHES,
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
    pixels,
    sized,
    square_patches,
    text,
    video,
    vision,
)
from tests.support.newer_media import NEWER
from tests.support.processors import PROCESSORS, TILES, write_files

_SEEN: dict[str, Family] = {
    **NEWER,
    "llava": Family(
        made(
            "Llava",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("CLIP"),
            image_token_index=IMAGE,
        ),
        image(1, 3, 28, 28),
    ),
    "llava-siglip-qwen2": Family(
        made(
            "Llava",
            text_config=lambda: text("Qwen2"),
            vision_config=lambda: vision("Siglip"),
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
        ),
        image(1, 3, 28, 28),
    ),
    "llava-pixtral": Family(
        made(
            "Llava",
            text_config=lambda: text("Mistral"),
            vision_config=lambda: vision("Pixtral", image_size=56),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "vipllava": Family(
        made(
            "VipLlava",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("CLIP", num_hidden_layers=3),
            image_token_index=IMAGE,
            vision_feature_layers=[-1, -2],
        ),
        image(1, 3, 28, 28),
    ),
    "llava-next": Family(
        made(
            "LlavaNext",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("CLIP"),
            image_token_index=IMAGE,
            image_grid_pinpoints=TILES,
        ),
        sized(1, 3, 3, 28, 28, size=(30, 60)),
    ),
    "llava-onevision": Family(
        made(
            "LlavaOnevision",
            text_config=lambda: text("Qwen2"),
            vision_config=lambda: vision("Siglip"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=TILES,
        ),
        sized(1, 3, 3, 28, 28, size=(30, 60), batch_num_images=[1]),
    ),
    "internvl": Family(
        made(
            "InternVL",
            text_config=lambda: text("Qwen2"),
            vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        image(2, 3, 28, 28),
    ),
    "internvl-qwen3": Family(
        made(
            "InternVL",
            text_config=lambda: text("Qwen3", head_dim=16),
            vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        image(2, 3, 28, 28),
    ),
    "idefics3": Family(
        made(
            "Idefics3",
            text_config=lambda: text("Llama"),
            vision_config=VIT,
            image_token_id=IMAGE,
        ),
        image(1, 2, 3, 28, 28),
    ),
    "smolvlm": Family(
        made(
            "SmolVLM",
            text_config=lambda: text("Llama"),
            vision_config=VIT,
            image_token_id=IMAGE,
        ),
        image(1, 2, 3, 28, 28),
    ),
    "mistral3": Family(
        made(
            "Mistral3",
            text_config=lambda: text("Mistral"),
            vision_config=lambda: vision("Pixtral", image_size=56),
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "lighton-ocr": Family(
        made(
            "LightOnOcr",
            text_config=lambda: text("Qwen3", head_dim=16),
            vision_config=lambda: vision("Pixtral", image_size=56),
            image_token_id=IMAGE,
            spatial_merge_size=2,
        ),
        sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "aya-vision": Family(
        made(
            "AyaVision",
            text_config=lambda: text("Cohere2"),
            vision_config=lambda: vision("Siglip"),
            image_token_index=IMAGE,
            downsample_factor=2,
        ),
        image(2, 3, 28, 28),
    ),
    "cohere2-vision": Family(
        made(
            "Cohere2Vision",
            text_config=lambda: text("Cohere2"),
            vision_config=lambda: vision("Siglip"),
            image_token_id=IMAGE,
            downsample_factor=2,
            alignment_intermediate_size=64,
        ),
        image(2, 3, 28, 28),
    ),
    "got-ocr2": Family(
        made(
            "GotOcr2",
            text_config=lambda: text("Qwen2"),
            vision_config=VIT
            | {"image_size": 64, "patch_size": 4, "mlp_dim": 48, "output_channels": 16}
            | {"window_size": 4, "global_attn_indexes": [1]},
            image_token_index=IMAGE,
            image_seq_length=1,
        ),
        image(1, 3, 64, 64),
    ),
    "ovis2": Family(
        made(
            "Ovis2",
            text_config=lambda: text("Qwen2"),
            vision_config=VIT
            | {"hidden_stride": 2, "num_visual_indicator_tokens": 5, "vocab_size": 40},
            image_token_id=IMAGE,
            visual_indicator_token_ids=[265, 266, 267, 268, 269],
            hidden_size=64,
            vocab_size=VOCAB,
        ),
        image(1, 3, 28, 28),
    ),
    "video-llama-3": Family(
        made(
            "VideoLlama3",
            text_config=lambda: text("Qwen2"),
            vision_config=VIT,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        lambda rng: {
            "pixel_values": pixels(rng, 16, 3 * 49),
            "image_grid_thw": np.array([[1, 4, 4]]),
            "image_merge_sizes": np.array([2]),
        },
    ),
    "janus": Family(
        made(
            "Janus",
            text_config=lambda: text("Llama"),
            vision_config=VIT
            | {"mlp_ratio": 1.5, "projection_dim": 64, "depth": 2, "num_image_tokens": 16},
            image_token_id=IMAGE,
        ),
        image(1, 3, 28, 28),
    ),
    "deepseek-vl": Family(
        made(
            "DeepseekVL",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("Siglip"),
            image_token_id=IMAGE,
        ),
        image(1, 3, 28, 28),
    ),
    "aria": Family(
        made(
            "Aria",
            text_config=TEXT | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            vision_config=VIT,
            image_token_index=IMAGE,
            projector_patch_to_query_dict={16: 4},
        ),
        image(1, 3, 28, 28),
    ),
    "qwen2-vl": Family(
        made(
            "Qwen2VL",
            text_config=TEXT | {"rope_parameters": M_ROPE},
            vision_config=PATCHES
            | {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        grid,
        types=TYPES,
    ),
    "qwen2.5-vl": Family(
        made(
            "Qwen2_5_VL",
            text_config=TEXT | {"rope_parameters": M_ROPE},
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"window_size": 16, "fullatt_block_indexes": [1]},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        grid,
        types=TYPES,
    ),
    "gemma3": Family(
        made(
            "Gemma3",
            text_config=TEXT
            | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            vision_config=lambda: vision("Siglip"),
            image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        image(1, 3, 28, 28),
        types="token_type_ids",
    ),
    "qwen3-vl-moe": Family(
        made(
            "Qwen3VLMoe",
            text_config=TEXT
            | {"head_dim": 16, "rope_parameters": INTERLEAVED, "num_experts": 4}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 48},
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        grid,
        types=TYPES,
    ),
    "qwen3-vl": Family(
        made(
            "Qwen3VL",
            text_config=TEXT | {"head_dim": 16, "rope_parameters": INTERLEAVED},
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        grid,
        types=TYPES,
    ),
    "deepseek-vl-hybrid": Family(
        made(
            "DeepseekVLHybrid",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("Siglip"),
            high_res_vision_config=VIT
            | {"hidden_size": 16, "image_size": 64, "patch_size": 4, "mlp_dim": 24}
            | {"output_channels": 16, "window_size": 4, "global_attn_indexes": [1]},
            image_token_id=IMAGE,
        ),
        lambda rng: {
            "pixel_values": pixels(rng, 1, 3, 28, 28),
            "high_res_pixel_values": pixels(rng, 1, 3, 64, 64),
        },
    ),
    "idefics2": Family(
        made(
            "Idefics2",
            text_config=lambda: text("Mistral"),
            vision_config=VIT,
            perceiver_config={
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            },
            image_token_id=IMAGE,
        ),
        image(1, 1, 3, 28, 28),
    ),
    "llava-next-video": Family(
        made(
            "LlavaNextVideo",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("CLIP"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=TILES,
        ),
        sized(1, 3, 3, 28, 28, size=(30, 60)),
    ),
    "video-llava": Family(
        made(
            "VideoLlava",
            text_config=lambda: text("Llama"),
            vision_config=lambda: vision("CLIP"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
        ),
        lambda rng: {"pixel_values_images": pixels(rng, 1, 3, 28, 28)},
    ),
    "glm4v": Family(
        made(
            "Glm4v",
            text_config=TEXT
            | {"head_dim": 16}
            | {
                "rope_parameters": M_ROPE
                | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            },
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
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
    "glm4v-moe": Family(
        made(
            "Glm4vMoe",
            text_config=TEXT
            | {"head_dim": 16, "moe_intermediate_size": 48, "n_routed_experts": 4}
            | {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
            | {
                "rope_parameters": M_ROPE
                | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            },
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
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
    "glm46v": Family(
        made(
            "Glm46V",
            text_config=TEXT
            | {"head_dim": 16, "model_type": "glm4v_text"}
            | {
                "rope_parameters": M_ROPE
                | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            },
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"image_size": 32, "model_type": "glm4v_vision"},
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
    "llama4": Family(
        made(
            "Llama4",
            text_config=TEXT
            | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4}
            | {"attention_chunk_size": 64, "no_rope_layer_interval": 3},
            vision_config=VIT
            | {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
            | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
            image_token_index=IMAGE,
        ),
        image(2, 3, 28, 28),
    ),
    "paligemma": Family(
        made(
            "PaliGemma",
            text_config=lambda: text("Gemma", head_dim=16),
            vision_config=lambda: vision("Siglip", projection_dim=64),
            image_token_index=IMAGE,
            projection_dim=64,
        ),
        image(1, 3, 28, 28),
        types="token_type_ids",
        prefix=True,
    ),
    "paligemma2": Family(
        made(
            "PaliGemma",
            text_config=lambda: text(
                "Gemma2", head_dim=16, sliding_window=44, query_pre_attn_scalar=16
            ),
            vision_config=lambda: vision("Siglip", projection_dim=64),
            image_token_index=IMAGE,
            projection_dim=64,
        ),
        image(1, 3, 28, 28),
        types="token_type_ids",
        prefix=True,
    ),
    "paddleocr-vl": Family(
        made(
            "PaddleOCRVL",
            text_config=TEXT | {"head_dim": 16, "rope_parameters": M_ROPE},
            vision_config=VIT | {"image_size": 28, "spatial_merge_size": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        square_patches,
        types=TYPES,
    ),
    "glm-asr": Family(
        made(
            "GlmAsr",
            text_config=lambda: text("Llama"),
            audio_config={
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_position_embeddings": 64,
            },
            audio_token_id=IMAGE,
        ),
        lambda rng: {
            "input_features": pixels(rng, 1, 16, 64),
            "input_features_mask": np.ones((1, 64), np.int64),
        },
        kind="audio",
    ),
    "granite-speech": Family(
        made(
            "GraniteSpeech",
            text_config=lambda: text("Granite", embedding_multiplier=3.0),
            encoder_config={
                "input_dim": 16,
                "num_layers": 2,
                "hidden_dim": 32,
                "num_heads": 2,
                "dim_head": 16,
                "context_size": 20,
                "output_dim": 8,
                "conv_kernel_size": 3,
                "max_pos_emb": 32,
            },
            projector_config={
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "encoder_hidden_size": 32,
            },
            audio_token_index=IMAGE,
            has_lora_adapter=False,
            downsample_rate=2,
            window_size=4,
        ),
        lambda rng: {"input_features": pixels(rng, 1, 40, 16)},
        kind="audio",
    ),
    "lfm2-vl": Family(
        made(
            "Lfm2Vl",
            text_config=lambda: text(
                "Lfm2",
                layer_types=["conv", "full_attention", "conv"],
                block_auto_adjust_ff_dim=False,
            ),
            vision_config=lambda: transformers.Siglip2VisionConfig(
                **VIT | {"num_patches": 16}
            ).to_dict(),
            image_token_id=IMAGE,
            downsample_factor=2,
        ),
        lambda rng: {
            "pixel_values": pixels(rng, 1, 16, 3 * 49),
            "spatial_shapes": np.array([[4, 4]]),
            "pixel_attention_mask": np.ones((1, 16), np.int64),
        },
    ),
    "exaone4.5": Family(
        made(
            "Exaone4_5_",
            text_config=lambda: text("Exaone4"),
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        grid,
    ),
    "qwen2-audio": Family(
        made(
            "Qwen2Audio",
            text_config=lambda: text("Qwen2"),
            audio_config={
                "d_model": 32,
                "encoder_ffn_dim": 48,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 50,
            },
            audio_token_index=IMAGE,
        ),
        heard(16, 100),
        kind="audio",
    ),
    "qwen2.5-omni": Family(
        made(
            "Qwen2_5OmniThinker",
            text_config=TEXT | {"rope_parameters": M_ROPE},
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"window_size": 16, "fullatt_block_indexes": [1]},
            audio_config={
                "d_model": 32,
                "encoder_ffn_dim": 48,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 50,
                "n_window": 10,
                "output_dim": 64,
            },
            audio_token_index=IMAGE,
            image_token_index=265,
            video_token_index=VIDEO,
            vision_start_token_id=266,
            audio_start_token_id=267,
        ),
        heard(16, 100),
        kind="audio",
    ),
    "voxtral": Family(
        made(
            "Voxtral",
            text_config=lambda: text("Llama"),
            audio_config={
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 20,
            },
            audio_token_id=IMAGE,
        ),
        lambda rng: {"input_features": pixels(rng, 1, 16, 40)},
        kind="audio",
    ),
}


VIDEOS: dict[str, Family] = {
    "qwen2-vl-video": replace(_SEEN["qwen2-vl"], draw=video(), kind="video", token=VIDEO),
    "qwen2.5-vl-video": replace(_SEEN["qwen2.5-vl"], draw=video(0.5), kind="video", token=VIDEO),
    "qwen3.5-video": replace(_SEEN["qwen3.5"], draw=video(), kind="video", token=VIDEO, parts=True),
    "qwen3-vl-video": replace(
        _SEEN["qwen3-vl"], draw=video(), kind="video", token=VIDEO, parts=True
    ),
}
FAMILIES: Mapping[str, Family] = _SEEN | VIDEOS


def write(name: str, folder: Path) -> Any:
    """Write the checkpoint of a family; return the model of transformers."""
    if name == "llama4":  # transformers 5.24 asks its text model for them, which has none
        outputs: Any = transformers.modeling_outputs.MoeCausalLMOutputWithPast
        outputs.image_outputs = None
    torch.manual_seed(5)
    model = transformers.AutoModelForMultimodalLM.from_config(FAMILIES[name].config())
    model.eval().float()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
            elif part.endswith(("_gate", ".gate", "gate_attn", "gate_ffn")):  # closed at first
                parameter.fill_(0.6)
    model.save_pretrained(folder)
    first, other = FAMILIES[name].saved
    if first:
        path = folder / "model.safetensors"
        named = {key.replace(first, other): x for key, x in load_file(path).items()}
        save_file(named, path, {"format": "pt"})
    return model


def write_served(name: str, folder: Path) -> Path:
    """Write a checkpoint that a server can serve: with tokenizer, template and processor."""
    files = PROCESSORS[name]
    write_files(files, folder)
    write(name, folder)
    return folder
