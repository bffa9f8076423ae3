"""Tiny checkpoints of models that see, as transformers writes them, and prompts with images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.support.scripted import write_checkpoint

VOCAB = 300
IMAGE, VIDEO = 263, 264  # behind the bytes and the tokens of `write_checkpoint`
TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string %}{{ m.content }}{% else %}"
    "{%- for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=265, vision_end_token_id=266, **ENDS,
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
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=265, vision_end_token_id=266, **ENDS,
    )  # fmt: skip
    return _qwen_vl(config, 4)


PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<|image_pad|>",
    },
    "qwen2-vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096},
    },
}
PROCESSORS["qwen2.5-vl"] = PROCESSORS["qwen2-vl"] | {"processor_class": "Qwen2_5_VLProcessor"}

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


def write_served(name: str, folder: Path) -> Path:
    """A checkpoint that a server can serve: with tokenizer, template and processor."""
    write_checkpoint(folder)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in TOKENS])
    backend.save(str(path))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write(name, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    own = {k: v for k, v in PROCESSORS[name].items() if k != "image_processor_type"}
    (folder / "processor_config.json").write_text(json.dumps(own))
    return folder
