"""Tiny checkpoints of models that see or hear, as transformers writes them, and what they see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.protocol.media import MediaKind
from tests.support.processors import PROCESSORS, TILES, write_files

VOCAB = 300
IMAGE, VIDEO = 263, 264  # behind the bytes and the tokens of `write_checkpoint`
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    **ENDS,
}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
PATCHES: dict[str, Any] = {
    "depth": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
PIXTRAL = VIT | {"image_size": 56}
M_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = M_ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}

_TYPES = "mm_token_type_ids"

Features = dict[str, np.ndarray]


@dataclass(frozen=True)
class Family:
    """A model that sees.

    Attributes:
        config: Of a tiny one.
        draw: Inputs of its encoder for an item, at random.
        kind: Of its items.
        token: That stands for an item.
        parts: Whether text divides the times of a video.
        prefix: Whether all tokens of a prompt see each other.
        types: How its code is told which tokens are items; empty: it is not.
        own: Inputs for the encoder alone; transformers counts by itself.
        join: Dimension along which inputs of several items are one tensor, if not the first.
        path: Of the text part.
        cross: Whether layers attend to items, each of which one token stands for.
        saved: A part of tensor names as transformers writes it, and as published.
    """

    config: Callable[[], Any]
    draw: Callable[[np.random.Generator], Features]
    kind: MediaKind = "image"
    types: str = ""
    token: int = IMAGE
    parts: bool = False
    prefix: bool = False
    own: tuple[str, ...] = ()
    join: Mapping[str, int] = field(default_factory=dict)
    path: str = "native"
    cross: bool = False
    saved: tuple[str, str] = ("", "")


def _pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _image(*shape: int) -> Callable[[np.random.Generator], Features]:
    return lambda rng: {"pixel_values": _pixels(rng, *shape)}


def _sized(*shape: int, size: tuple[int, int], **more: list[int]) -> Callable[..., Features]:
    extra = {name: np.array(value) for name, value in more.items()}
    return lambda rng: {
        "pixel_values": _pixels(rng, *shape),
        "image_sizes": np.array([size]),
        **extra,
    }


def _grid(rng: np.random.Generator) -> Features:
    height, width = (2 * int(n) for n in rng.integers(1, 5, 2))
    patches = _pixels(rng, height * width, 3 * 2 * 4 * 4)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, height, width]], np.int64)}


def _square_patches(rng: np.random.Generator) -> Features:
    """Patches of 7 x 7 pixels, (N, 3, 7, 7)."""
    height, width = (2 * int(n) for n in rng.integers(1, 5, 2))
    patches = _pixels(rng, height * width, 3, 7, 7)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, height, width]], np.int64)}


def _video(seconds: float | None = None) -> Callable[[np.random.Generator], Features]:
    """Two times of a grid whose sides are longer: transformers counts time otherwise than Qwen."""

    def draw(rng: np.random.Generator) -> Features:
        height, width = (2 * int(n) for n in rng.integers(3, 5, 2))
        found = {
            "pixel_values_videos": _pixels(rng, 2 * height * width, 3 * 2 * 4 * 4),
            "video_grid_thw": np.array([[2, height, width]], np.int64),
        }
        if seconds is not None:
            found["second_per_grid_ts"] = np.array([seconds], np.float32)
        return found

    return draw


def _heard(mels: int, frames: int) -> Callable[[np.random.Generator], Features]:
    """A sound, and how much of it is padding."""

    def draw(rng: np.random.Generator) -> Features:
        mask = np.zeros((1, frames), np.int64)
        mask[:, : 2 * int(rng.integers(frames // 4, frames // 2))] = 1
        return {"input_features": _pixels(rng, 1, mels, frames), "feature_attention_mask": mask}

    return draw


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return getattr(transformers, f"{kind}Config")(**TEXT | more).to_dict()


def _vision(kind: str, **more: Any) -> dict[str, Any]:
    return getattr(transformers, f"{kind}VisionConfig")(**VIT | more).to_dict()


def _made(kind: str, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{kind}Config")(
        **{name: made() if callable(made) else made for name, made in fields.items()} | ENDS
    )


def _packed_patches(rng: np.random.Generator) -> Features:
    """Patches side by side, (1, 3, 7, 7 N), of an image of multiples of four patches."""
    height, width = (4 * int(n) for n in rng.integers(1, 3, 2))
    patches = _pixels(rng, 1, 3, 7, 7 * height * width)
    return {"pixel_values": patches, "target_sizes": np.array([[height, width]], np.int32)}


def _placed_patches(rng: np.random.Generator) -> Features:
    """16 patches of 4 x 4 pixels, and where they are: (x, y)."""
    height = (2, 4, 8)[int(rng.integers(3))]
    places = np.stack(np.meshgrid(np.arange(16 // height), np.arange(height)), -1)
    return {
        "pixel_values": _pixels(rng, 1, 16, 48),
        "image_position_ids": places.reshape(1, 16, 2).astype(np.int64),
    }


def _sub_images(rng: np.random.Generator) -> Features:
    """A whole image and two parts side by side; parts have 2 x 2 vectors and a line's end."""
    return {
        "image_pixel_values": _pixels(rng, 1, 3, 3, 28, 28),
        "image_sizes": np.array([[28, 56]]),
        "image_attention_mask": np.ones((1, 3, 4, 4), np.int64),
        "num_img_tokens": np.array([2 * (2 + 1) + 1 + 2 * (4 + 1)]),
    }


def _tiles(rng: np.random.Generator) -> Features:
    """One to four tiles in a row, and what fills up the rest."""
    count = int(rng.integers(1, 5))
    return {
        "pixel_values": _pixels(rng, 1, 1, 4, 3, 28, 28),
        "aspect_ratio_ids": np.array([[count]]),
        "aspect_ratio_mask": (np.arange(4) < count).astype(np.int64)[None, None],
    }


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
}
_DELTA: dict[str, Any] = TEXT | {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 0.5},
}
_PHI4: dict[str, Any] = {
    "vision_config": VIT | {"crop_size": 28, "image_token_id": IMAGE},
    "audio_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 8,
        "input_size": 16,
        "audio_token_id": VIDEO,
    },
}

_SEEN: dict[str, Family] = {
    "llava": Family(
        _made(
            "Llava",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("CLIP"),
            image_token_index=IMAGE,
        ),
        _image(1, 3, 28, 28),
    ),
    "llava-siglip-qwen2": Family(
        _made(
            "Llava",
            text_config=lambda: _text("Qwen2"),
            vision_config=lambda: _vision("Siglip"),
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
        ),
        _image(1, 3, 28, 28),
    ),
    "llava-pixtral": Family(
        _made(
            "Llava",
            text_config=lambda: _text("Mistral"),
            vision_config=lambda: _vision("Pixtral", image_size=56),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        _sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "vipllava": Family(
        _made(
            "VipLlava",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("CLIP", num_hidden_layers=3),
            image_token_index=IMAGE,
            vision_feature_layers=[-1, -2],
        ),
        _image(1, 3, 28, 28),
    ),
    "llava-next": Family(
        _made(
            "LlavaNext",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("CLIP"),
            image_token_index=IMAGE,
            image_grid_pinpoints=TILES,
        ),
        _sized(1, 3, 3, 28, 28, size=(30, 60)),
    ),
    "llava-onevision": Family(
        _made(
            "LlavaOnevision",
            text_config=lambda: _text("Qwen2"),
            vision_config=lambda: _vision("Siglip"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=TILES,
        ),
        _sized(1, 3, 3, 28, 28, size=(30, 60), batch_num_images=[1]),
    ),
    "internvl": Family(
        _made(
            "InternVL",
            text_config=lambda: _text("Qwen2"),
            vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        _image(2, 3, 28, 28),
    ),
    "internvl-qwen3": Family(
        _made(
            "InternVL",
            text_config=lambda: _text("Qwen3", head_dim=16),
            vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        _image(2, 3, 28, 28),
    ),
    "idefics3": Family(
        _made(
            "Idefics3",
            text_config=lambda: _text("Llama"),
            vision_config=VIT,
            image_token_id=IMAGE,
        ),
        _image(1, 2, 3, 28, 28),
    ),
    "smolvlm": Family(
        _made(
            "SmolVLM",
            text_config=lambda: _text("Llama"),
            vision_config=VIT,
            image_token_id=IMAGE,
        ),
        _image(1, 2, 3, 28, 28),
    ),
    "mistral3": Family(
        _made(
            "Mistral3",
            text_config=lambda: _text("Mistral"),
            vision_config=lambda: _vision("Pixtral", image_size=56),
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        _sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "lighton-ocr": Family(
        _made(
            "LightOnOcr",
            text_config=lambda: _text("Qwen3", head_dim=16),
            vision_config=lambda: _vision("Pixtral", image_size=56),
            image_token_id=IMAGE,
            spatial_merge_size=2,
        ),
        _sized(1, 3, 28, 42, size=(28, 42)),
    ),
    "aya-vision": Family(
        _made(
            "AyaVision",
            text_config=lambda: _text("Cohere2"),
            vision_config=lambda: _vision("Siglip"),
            image_token_index=IMAGE,
            downsample_factor=2,
        ),
        _image(2, 3, 28, 28),
    ),
    "cohere2-vision": Family(
        _made(
            "Cohere2Vision",
            text_config=lambda: _text("Cohere2"),
            vision_config=lambda: _vision("Siglip"),
            image_token_id=IMAGE,
            downsample_factor=2,
            alignment_intermediate_size=64,
        ),
        _image(2, 3, 28, 28),
    ),
    "got-ocr2": Family(
        _made(
            "GotOcr2",
            text_config=lambda: _text("Qwen2"),
            vision_config=VIT
            | {"image_size": 64, "patch_size": 4, "mlp_dim": 48, "output_channels": 16}
            | {"window_size": 4, "global_attn_indexes": [1]},
            image_token_index=IMAGE,
            image_seq_length=1,
        ),
        _image(1, 3, 64, 64),
    ),
    "ovis2": Family(
        _made(
            "Ovis2",
            text_config=lambda: _text("Qwen2"),
            vision_config=VIT
            | {"hidden_stride": 2, "num_visual_indicator_tokens": 5, "vocab_size": 40},
            image_token_id=IMAGE,
            visual_indicator_token_ids=[265, 266, 267, 268, 269],
            hidden_size=64,
            vocab_size=VOCAB,
        ),
        _image(1, 3, 28, 28),
    ),
    "video-llama-3": Family(
        _made(
            "VideoLlama3",
            text_config=lambda: _text("Qwen2"),
            vision_config=VIT,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        lambda rng: {
            "pixel_values": _pixels(rng, 16, 3 * 49),
            "image_grid_thw": np.array([[1, 4, 4]]),
            "image_merge_sizes": np.array([2]),
        },
    ),
    "janus": Family(
        _made(
            "Janus",
            text_config=lambda: _text("Llama"),
            vision_config=VIT
            | {"mlp_ratio": 1.5, "projection_dim": 64, "depth": 2, "num_image_tokens": 16},
            image_token_id=IMAGE,
        ),
        _image(1, 3, 28, 28),
    ),
    "deepseek-vl": Family(
        _made(
            "DeepseekVL",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("Siglip"),
            image_token_id=IMAGE,
        ),
        _image(1, 3, 28, 28),
    ),
    "aria": Family(
        _made(
            "Aria",
            text_config=TEXT | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            vision_config=VIT,
            image_token_index=IMAGE,
            projector_patch_to_query_dict={16: 4},
        ),
        _image(1, 3, 28, 28),
    ),
    "qwen2-vl": Family(
        _made(
            "Qwen2VL",
            text_config=TEXT | {"rope_parameters": M_ROPE},
            vision_config=PATCHES
            | {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        _grid,
        types=_TYPES,
    ),
    "qwen2.5-vl": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "gemma3": Family(
        _made(
            "Gemma3",
            text_config=TEXT
            | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            vision_config=lambda: _vision("Siglip"),
            image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        _image(1, 3, 28, 28),
        types="token_type_ids",
    ),
    "qwen3-vl-moe": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "qwen3-vl": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "deepseek-vl-hybrid": Family(
        _made(
            "DeepseekVLHybrid",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("Siglip"),
            high_res_vision_config=VIT
            | {"hidden_size": 16, "image_size": 64, "patch_size": 4, "mlp_dim": 24}
            | {"output_channels": 16, "window_size": 4, "global_attn_indexes": [1]},
            image_token_id=IMAGE,
        ),
        lambda rng: {
            "pixel_values": _pixels(rng, 1, 3, 28, 28),
            "high_res_pixel_values": _pixels(rng, 1, 3, 64, 64),
        },
    ),
    "idefics2": Family(
        _made(
            "Idefics2",
            text_config=lambda: _text("Mistral"),
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
        _image(1, 1, 3, 28, 28),
    ),
    "llava-next-video": Family(
        _made(
            "LlavaNextVideo",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("CLIP"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=TILES,
        ),
        _sized(1, 3, 3, 28, 28, size=(30, 60)),
    ),
    "video-llava": Family(
        _made(
            "VideoLlava",
            text_config=lambda: _text("Llama"),
            vision_config=lambda: _vision("CLIP"),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
        ),
        lambda rng: {"pixel_values_images": _pixels(rng, 1, 3, 28, 28)},
    ),
    "glm4v": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "glm4v-moe": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "glm46v": Family(
        _made(
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
        _grid,
        types=_TYPES,
    ),
    "llama4": Family(
        _made(
            "Llama4",
            text_config=TEXT
            | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4}
            | {"attention_chunk_size": 64, "no_rope_layer_interval": 3},
            vision_config=VIT
            | {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
            | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
            image_token_index=IMAGE,
        ),
        _image(2, 3, 28, 28),
    ),
    "paligemma": Family(
        _made(
            "PaliGemma",
            text_config=lambda: _text("Gemma", head_dim=16),
            vision_config=lambda: _vision("Siglip", projection_dim=64),
            image_token_index=IMAGE,
            projection_dim=64,
        ),
        _image(1, 3, 28, 28),
        types="token_type_ids",
        prefix=True,
    ),
    "paddleocr-vl": Family(
        _made(
            "PaddleOCRVL",
            text_config=TEXT | {"head_dim": 16, "rope_parameters": M_ROPE},
            vision_config=VIT | {"image_size": 28, "spatial_merge_size": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        _square_patches,
        types=_TYPES,
    ),
    "glm-asr": Family(
        _made(
            "GlmAsr",
            text_config=lambda: _text("Llama"),
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
            "input_features": _pixels(rng, 1, 16, 64),
            "input_features_mask": np.ones((1, 64), np.int64),
        },
        kind="audio",
    ),
    "granite-speech": Family(
        _made(
            "GraniteSpeech",
            text_config=lambda: _text("Granite", embedding_multiplier=3.0),
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
        lambda rng: {"input_features": _pixels(rng, 1, 40, 16)},
        kind="audio",
    ),
    "lfm2-vl": Family(
        _made(
            "Lfm2Vl",
            text_config=lambda: _text(
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
            "pixel_values": _pixels(rng, 1, 16, 3 * 49),
            "spatial_shapes": np.array([[4, 4]]),
            "pixel_attention_mask": np.ones((1, 16), np.int64),
        },
    ),
    "exaone4.5": Family(
        _made(
            "Exaone4_5_",
            text_config=lambda: _text("Exaone4"),
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        _grid,
    ),
    "qwen2-audio": Family(
        _made(
            "Qwen2Audio",
            text_config=lambda: _text("Qwen2"),
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
        _heard(16, 100),
        kind="audio",
    ),
    "qwen2.5-omni": Family(
        _made(
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
        _heard(16, 100),
        kind="audio",
    ),
    "glm-ocr": Family(
        _made(
            "GlmOcr",
            text_config=TEXT | {"rope_parameters": M_ROPE},
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
        _grid,
        types=_TYPES,
    ),
    "qianfan-ocr": Family(
        _made(
            "QianfanOCR",
            text_config=lambda: _text("Qwen3", head_dim=16),
            vision_config=VIT | {"image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        _image(2, 3, 28, 28),
        saved=("language_model.model.encoder.layers.", "language_model.model.layers."),
    ),
    "hyperclovax-vision": Family(
        _made(
            "HyperCLOVAXVisionV2",
            text_config=lambda: _text("HyperCLOVAX", head_dim=16, embedding_multiplier=3.0),
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 40, "num_heads": 2}
            | {"window_size": 16, "fullatt_block_indexes": [1], "model_type": "qwen2_5_vl_vision"},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        _grid,
    ),
    "kimi-k2.5": Family(
        _made(
            "Kimi_K25",
            text_config=lambda: _text("DeepseekV3", **_LATENT),
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
        _square_patches,
        saved=("language_model.model.blocks.", "language_model.model.layers."),
    ),
    "qwen3.5": Family(
        _made(
            "Qwen3_5",
            text_config=_DELTA,
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
            | {"num_position_embeddings": 16},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=265,
            vision_end_token_id=266,
        ),
        _grid,
        types=_TYPES,
    ),
    "minicpm-v-4.6": Family(
        _made(
            "MiniCPMV4_6",
            text_config=_DELTA | {"model_type": "qwen3_5_text"},
            vision_config=VIT | {"num_hidden_layers": 3, "image_size": 56},
            insert_layer_id=1,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        _packed_patches,
        join={"pixel_values": -1},
    ),
    "deepseek-ocr2": Family(
        _made(
            "DeepseekOcr2",
            text_config=TEXT
            | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 48, "n_shared_experts": 1}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            vision_config={
                "sam_config": VIT
                | {"image_size": 64, "patch_size": 4, "mlp_dim": 48, "output_channels": 16}
                | {"window_size": 4, "global_attn_indexes": [1], "downsample_channels": [24, 32]},
                "encoder_config": TEXT | {"hidden_size": 32, "num_hidden_layers": 2},
            },
            image_token_id=IMAGE,
        ),
        _image(1, 3, 64, 64),
    ),
    "granite-docling": Family(
        _made(
            "GraniteDocling",
            text_config=TEXT | {"embedding_multiplier": 3.0},
            vision_config=VIT
            | {"scale_factor": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            image_token_id=IMAGE,
        ),
        lambda rng: {
            "pixel_values": _pixels(rng, 1, 2, 3, 28, 28),
            "pixel_attention_mask": np.ones((1, 2), bool),
        },
    ),
    "phi4-multimodal": Family(
        _made("Phi4Multimodal", **TEXT | _PHI4),
        _sub_images,
        own=("num_img_tokens",),
    ),
    "phi4-multimodal-audio": Family(
        _made("Phi4Multimodal", **TEXT | _PHI4),
        lambda rng: {
            "audio_input_features": _pixels(rng, 1, 64, 16),
            "audio_embed_sizes": np.array([8]),
        },
        kind="audio",
        token=VIDEO,
    ),
    "qwen3-omni": Family(
        _made(
            "Qwen3OmniMoeThinker",
            text_config=TEXT
            | {"head_dim": 16, "rope_parameters": INTERLEAVED, "num_experts": 4}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 48},
            vision_config=PATCHES
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2}
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
        _heard(16, 200),
        kind="audio",
    ),
    "qwen3-asr": Family(
        _made(
            "Qwen3ASR",
            text_config=lambda: _text("Qwen3", head_dim=16),
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
            "input_features": _pixels(rng, 1, 16, 200),
            "input_features_mask": np.ones((1, 200), np.int64),
        },
        kind="audio",
    ),
    "gemma4": Family(
        _made(
            "Gemma4",
            text_config=TEXT
            | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 12}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
            | {"global_head_dim": 32},
            vision_config=VIT
            | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2}
            | {"position_embedding_size": 16},
            audio_config=None,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=265,
        ),
        _placed_patches,
        types=_TYPES,
        path="transformers",
    ),
    "mllama": Family(
        _made(
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
        _tiles,
        token=VOCAB,
        join=dict.fromkeys(("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), 1),
        cross=True,
    ),
    "voxtral": Family(
        _made(
            "Voxtral",
            text_config=lambda: _text("Llama"),
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
        lambda rng: {"input_features": _pixels(rng, 1, 16, 40)},
        kind="audio",
    ),
}


VIDEOS: dict[str, Family] = {
    "qwen2-vl-video": replace(_SEEN["qwen2-vl"], draw=_video(), kind="video", token=VIDEO),
    "qwen2.5-vl-video": replace(_SEEN["qwen2.5-vl"], draw=_video(0.5), kind="video", token=VIDEO),
    "qwen3.5-video": replace(
        _SEEN["qwen3.5"], draw=_video(), kind="video", token=VIDEO, parts=True
    ),
    "qwen3-vl-video": replace(
        _SEEN["qwen3-vl"], draw=_video(), kind="video", token=VIDEO, parts=True
    ),
}
FAMILIES: Mapping[str, Family] = _SEEN | VIDEOS


def write(name: str, folder: Path) -> Any:
    """Write the checkpoint of a family; returns the model of transformers."""
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
    """A checkpoint that a server can serve: with tokenizer, template and processor."""
    files = PROCESSORS[name]
    write_files(files, folder)
    write(name, folder)
    return folder
