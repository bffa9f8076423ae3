"""Multimodal checkpoints that are served for text only; tensors of encoders are ignored."""

from __future__ import annotations

from typing import Any

from sylvan.runtime.models.config import architecture_of

IMAGES = (
    *(
        "vision_tower.",
        "image_tower.",
        "video_tower.",
        "vision_model.",
        "vision_encoder.",
        "encoder.",
        "multi_modal_projector.",
        "visual.",
    ),
    *("connector.", "image_newline", "audio_tower.", "patch_merger.", "vision_projection."),
    *("projector.", "vqmodel.", "aligner.", "generation_", "visual_embeddings_table."),
    *("high_res_vision_", "mlp_AR.", "view_seperator", "view_separator", "talker.", "token2wav."),
    *("code2wav.", "embed_tokens_extend.", "embed_vision.", "embed_audio.", "merger.", "mlp1."),
    *("mm_projector.", "density_router.", "vision_projector.", "qwen2_model.", "sam_model."),
    *("mlp1.", "embedding_proj_layer.", "vision_embed_tokens.", "vpm.", "resampler.", "vision."),
)
"""Name prefixes of tensors of image and audio encoders."""


_OF_ALL = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of the text part, with the architecture of the whole."""
    said = {name: raw[name] for name in _OF_ALL if raw.get(name) is not None}
    text: dict[str, Any] = raw | (raw.get("text_config") or {}) | said
    return text | {"architectures": [architecture_of(raw)]}


def text_name(name: str) -> str:
    """Strip the prefixes of old and new checkpoints from a tensor name."""
    for prefix in (
        *("thinker.", "vlm.", "llm.", "language.", "model.", "language_model.", "text_model."),
        "model.",
    ):
        name = name.removeprefix(prefix)
    return name


_PREFIXES = ("model.", "transformer.", "gpt_neox.", "decoder.", "backbone.")


def canonical(name: str) -> str:
    """Strip the prefix that many checkpoints use from a tensor name."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
