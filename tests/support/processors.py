"""Tiny processor configurations of multimodal checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.support.scripted import write_checkpoint

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string %}{{ m.content }}{% else %}"
    "{%- for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part.type == 'audio' %}<|AUDIO|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILES = [[28, 56], [56, 28], [56, 56]]


@dataclass(frozen=True)
class Files:
    """Processor configuration of a checkpoint.

    Attributes:
        images: preprocessor_config.json.
        whole: processor_config.json, without the name of the class.
        tokens: Special tokens; the first has the id `IMAGE`.
        names: Tokens that the tokenizer has names for.
        videos: video_preprocessor_config.json; empty: there is none.
    """

    images: dict[str, Any]
    whole: dict[str, Any]
    tokens: tuple[str, ...]
    names: dict[str, str]
    videos: dict[str, Any] = field(default_factory=dict)


def _files(
    kind: str,
    images: str,
    tokens: str,
    whole: dict[str, Any] | None = None,
    names: dict[str, str] | None = None,
    **settings: Any,
) -> Files:
    types = {
        "image_processor_type": f"{images}ImageProcessor",
        "processor_class": f"{kind}Processor",
    }
    return Files(types | settings, whole or {}, tuple(tokens.split()), names or {})


_CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_LLAVA = {
    "patch_size": 7,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<image>",
}
_SQUARE = {"size": {"height": 28, "width": 28}}
_CUT = _SQUARE | {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_IDEFICS = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_FENCES = "<image> <fake_token_around_image> <global-img> <end_of_utterance>"
_QWEN = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
}
_QWEN_TOKENS = "<|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>"

HEARS: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 1,
    "return_attention_mask": True,
}

PROCESSORS: Mapping[str, Files] = {
    "llava": _files("Llava", "CLIP", "<image>", _LLAVA, **_CLIP),
    "vipllava": _files("Llava", "CLIP", "<image>", _LLAVA, **_CLIP),
    "llava-next": _files(
        "LlavaNext", "LlavaNext", "<image>", _LLAVA, **_CLIP, image_grid_pinpoints=TILES
    ),
    "llava-onevision": _files(
        "LlavaOnevision",
        "LlavaOnevision",
        "<image> <video>",
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        **_SQUARE,
        image_grid_pinpoints=TILES,
    ),
    "internvl": _files(
        "InternVL",
        "GotOcr2",
        "<IMG_CONTEXT> <img> </img> <video>",
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        **_CUT,
    ),
    "idefics3": _files("Idefics3", "Idefics3", _FENCES, {"image_seq_len": 4}, **_IDEFICS),
    "smolvlm": _files("SmolVLM", "SmolVLM", _FENCES, {"image_seq_len": 4}, **_IDEFICS),
    "aya-vision": _files(
        "AyaVision",
        "GotOcr2",
        "<|IMG_PATCH|> <image> <|START_OF_IMG|> <|END_OF_IMG|> TILE TILE_GLOBAL",
        {"patch_size": 7, "img_size": 28, "downsample_factor": 2},
        **_CUT,
    ),
    "ovis2": _files(
        "Ovis2",
        "Ovis2",
        "<IMG_ATOM> <image> <IMG_START> <IMG_END> <IMG_GRID> <IMG_COL> <IMG_ROW>",
        {"image_seq_length": 4},
        **_SQUARE,
    ),
    "deepseek-vl": _files(
        "DeepseekVL",
        "DeepseekVL",
        "<image_placeholder>",
        {"num_image_tokens": 16},
        {"image_token": "<image_placeholder>"},
        **_SQUARE,
    ),
    "video-llama-3": _files(
        "VideoLlama3",
        "VideoLlama3",
        "<image> <video>",
        None,
        {"image_token": "<image>", "video_token": "<video>"},
        patch_size=7,
        merge_size=2,
        min_pixels=196 * 4,
        max_pixels=196 * 16,
    ),
    "lighton-ocr": _files(
        "LightOnOcr",
        "Pixtral",
        "<|image_pad|> <|vision_pad|> <|vision_end|>",
        {"patch_size": 7, "spatial_merge_size": 2},
        {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        size={"longest_edge": 56},
        patch_size={"height": 7, "width": 7},
    ),
    "qwen2-vl": replace(_files("Qwen2VL", "Qwen2VL", _QWEN_TOKENS, **_QWEN), videos=_QWEN),
    "qwen2.5-vl": replace(_files("Qwen2_5_VL", "Qwen2VL", _QWEN_TOKENS, **_QWEN), videos=_QWEN),
    "qwen3-vl": replace(
        _files("Qwen3VL", "Qwen2VL", _QWEN_TOKENS, **_QWEN),
        videos=_QWEN | {"size": {"shortest_edge": 1024, "longest_edge": 1 << 14}},
    ),
    "gemma3": _files(
        "Gemma3",
        "Gemma3",
        "<image_soft_token> <start_of_image> <end_of_image>",
        {"image_seq_length": 4},
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        **_SQUARE,
    ),
    "qwen2-audio": Files(
        HEARS | {"processor_class": "Qwen2AudioProcessor"},
        {},
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        {},
    ),
}


def write_files(files: Files, folder: Path) -> None:
    """Tokenizer, template and processor of a checkpoint."""
    write_checkpoint(folder)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    added = [AddedToken(t, special=True, normalized=False) for t in files.tokens]
    backend.add_special_tokens(added)
    backend.save(str(path))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # else that of the model makes another one
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    if files.names:
        settings["extra_special_tokens"] = files.names
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    kind = {"processor_class": files.images["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(files.images))
    (folder / "processor_config.json").write_text(json.dumps(files.whole | kind))
    if files.videos:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(files.videos))
