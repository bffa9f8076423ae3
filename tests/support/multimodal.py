"""Tiny checkpoints of models that see, as transformers writes them, and prompts with images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 300
IMAGE = 290
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
CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
M_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Image:
    """Inputs of an encoder, and the tokens that stand for it in a prompt."""

    features: dict[str, np.ndarray]
    tokens: list[int]
    grid: tuple[int, int, int] | None = None


Draw = Callable[[np.random.Generator], Image]


def _pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def llava() -> tuple[Any, Draw]:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT).to_dict(),
        vision_config=transformers.CLIPVisionConfig(**CLIP).to_dict(),
        image_token_index=IMAGE,
        **ENDS,
    )

    def draw(rng: np.random.Generator) -> Image:
        return Image({"pixel_values": _pixels(rng, 1, 3, 28, 28)}, [IMAGE] * 16)

    return config, draw


def _qwen_vl(config: Any, patch: int) -> tuple[Any, Draw]:
    def draw(rng: np.random.Generator) -> Image:
        height, width = (2 * int(n) for n in rng.integers(1, 5, 2))
        patches = _pixels(rng, height * width, 3 * 2 * patch * patch)
        grid = np.array([[1, height, width]], np.int64)
        count = height * width // 4
        features = {"pixel_values": patches, "image_grid_thw": grid}
        return Image(features, [IMAGE] * count, (1, height // 2, width // 2))

    return config, draw


def qwen2_vl() -> tuple[Any, Draw]:
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    text = TEXT | {"rope_parameters": M_ROPE}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=291,
        vision_start_token_id=292, vision_end_token_id=293, **ENDS,
    )  # fmt: skip
    return _qwen_vl(config, 4)


def qwen25_vl() -> tuple[Any, Draw]:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
        "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 16, "fullatt_block_indexes": [1], "in_channels": 3,
    }  # fmt: skip
    text = TEXT | {"rope_parameters": M_ROPE}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=291,
        vision_start_token_id=292, vision_end_token_id=293, **ENDS,
    )  # fmt: skip
    return _qwen_vl(config, 4)


FAMILIES: dict[str, Callable[[], tuple[Any, Draw]]] = {
    "llava": llava,
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen25_vl,
}


def write(name: str, folder: Path) -> tuple[Any, Draw]:
    """Write the checkpoint; the model of transformers, and what draws images for it."""
    config, draw = FAMILIES[name]()
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    return model, draw
