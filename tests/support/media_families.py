"""Tiny multimodal models with random weights, and random items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers

from sylvan.protocol.media import MediaKind

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

TYPES = "mm_token_type_ids"

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
        types: Argument that marks item tokens for its code; empty: none.
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


def pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def image(*shape: int) -> Callable[[np.random.Generator], Features]:
    return lambda rng: {"pixel_values": pixels(rng, *shape)}


def sized(*shape: int, size: tuple[int, int], **more: list[int]) -> Callable[..., Features]:
    extra = {name: np.array(value) for name, value in more.items()}
    return lambda rng: {
        "pixel_values": pixels(rng, *shape),
        "image_sizes": np.array([size]),
        **extra,
    }


def grid(rng: np.random.Generator) -> Features:
    height, width = (2 * int(n) for n in rng.integers(1, 5, 2))
    patches = pixels(rng, height * width, 3 * 2 * 4 * 4)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, height, width]], np.int64)}


def square_patches(rng: np.random.Generator) -> Features:
    """Patches of 7 x 7 pixels, (N, 3, 7, 7)."""
    height, width = (2 * int(n) for n in rng.integers(1, 5, 2))
    patches = pixels(rng, height * width, 3, 7, 7)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, height, width]], np.int64)}


def video(seconds: float | None = None) -> Callable[[np.random.Generator], Features]:
    """Two times of a grid whose sides are longer: transformers counts time otherwise than Qwen."""

    def draw(rng: np.random.Generator) -> Features:
        height, width = (2 * int(n) for n in rng.integers(3, 5, 2))
        found = {
            "pixel_values_videos": pixels(rng, 2 * height * width, 3 * 2 * 4 * 4),
            "video_grid_thw": np.array([[2, height, width]], np.int64),
        }
        if seconds is not None:
            found["second_per_grid_ts"] = np.array([seconds], np.float32)
        return found

    return draw


def heard(mels: int, frames: int) -> Callable[[np.random.Generator], Features]:
    """A sound, and how much of it is padding."""

    def draw(rng: np.random.Generator) -> Features:
        mask = np.zeros((1, frames), np.int64)
        mask[:, : 2 * int(rng.integers(frames // 4, frames // 2))] = 1
        return {"input_features": pixels(rng, 1, mels, frames), "feature_attention_mask": mask}

    return draw


def text(kind: str, **more: Any) -> dict[str, Any]:
    return getattr(transformers, f"{kind}Config")(**TEXT | more).to_dict()


def vision(kind: str, **more: Any) -> dict[str, Any]:
    return getattr(transformers, f"{kind}VisionConfig")(**VIT | more).to_dict()


def made(kind: str, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{kind}Config")(
        **{name: made() if callable(made) else made for name, made in fields.items()} | ENDS
    )


def packed_patches(rng: np.random.Generator) -> Features:
    """Patches side by side, (1, 3, 7, 7 N), of an image of multiples of four patches."""
    height, width = (4 * int(n) for n in rng.integers(1, 3, 2))
    patches = pixels(rng, 1, 3, 7, 7 * height * width)
    return {"pixel_values": patches, "target_sizes": np.array([[height, width]], np.int32)}


def placed_patches(rng: np.random.Generator) -> Features:
    """16 patches of 4 x 4 pixels, and where they are: (x, y)."""
    height = (2, 4, 8)[int(rng.integers(3))]
    places = np.stack(np.meshgrid(np.arange(16 // height), np.arange(height)), -1)
    return {
        "pixel_values": pixels(rng, 1, 16, 48),
        "image_position_ids": places.reshape(1, 16, 2).astype(np.int64),
    }


def sub_images(rng: np.random.Generator) -> Features:
    """A whole image and two parts side by side; parts have 2 x 2 vectors and a line's end."""
    return {
        "image_pixel_values": pixels(rng, 1, 3, 3, 28, 28),
        "image_sizes": np.array([[28, 56]]),
        "image_attention_mask": np.ones((1, 3, 4, 4), np.int64),
        "num_img_tokens": np.array([2 * (2 + 1) + 1 + 2 * (4 + 1)]),
    }


def tiles(rng: np.random.Generator) -> Features:
    """One to four tiles in a row, and what fills up the rest."""
    count = int(rng.integers(1, 5))
    return {
        "pixel_values": pixels(rng, 1, 1, 4, 3, 28, 28),
        "aspect_ratio_ids": np.array([[count]]),
        "aspect_ratio_mask": (np.arange(4) < count).astype(np.int64)[None, None],
    }


LATENT: dict[str, Any] = {
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
DELTA: dict[str, Any] = TEXT | {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 0.5},
}
PHI4: dict[str, Any] = {
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
