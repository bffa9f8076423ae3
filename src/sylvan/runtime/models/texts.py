"""Checkpoints that also see images, served for texts: their other half is left alone."""

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
    *("high_res_vision_", "mlp_AR.", "view_seperator", "talker.", "token2wav."),
)
"""Starts of names of tensors that look at images, or listen."""


_OF_ALL = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of the half that reads texts, under the name of the whole."""
    said = {name: raw[name] for name in _OF_ALL if raw.get(name) is not None}
    text: dict[str, Any] = raw | (raw.get("text_config") or {}) | said
    return text | {"architectures": [architecture_of(raw)]}


def text_name(name: str) -> str:
    """The name of a tensor without what stands before it, in old checkpoints and new ones."""
    for prefix in ("thinker.", "model.", "language_model.", "text_model.", "model."):
        name = name.removeprefix(prefix)
    return name


_PREFIXES = ("model.", "transformer.", "gpt_neox.", "decoder.", "backbone.")


def canonical(name: str) -> str:
    """The name of a tensor without what many checkpoints put before it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
