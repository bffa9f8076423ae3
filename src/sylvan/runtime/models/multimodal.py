"""Multimodal models whose text part is a native family.

The encoder belongs to a capability (`features.multimodal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig, ModelMedia, NotNative, architecture_of
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.models.text_parts import text_part

Raw = dict[str, Any]

_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "aria_text": "AriaTextForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "deepseek_ocr2_text": "DeepseekForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "glm4v_moe_text": "Glm4MoeForCausalLM",
        "glm4v_text": "Glm4ForCausalLM",
        "glm_ocr_text": "Glm4ForCausalLM",
        "granite": "GraniteForCausalLM",
        "granite_docling_text": "GraniteForCausalLM",
        "helium": "HeliumForCausalLM",
        "hyperclovax": "HyperCLOVAXForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "paddleocr_vl_text": "LlamaForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "phi4_multimodal": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_5_omni_text": "Qwen2ForCausalLM",
        "qwen2_5_vl": "Qwen2ForCausalLM",
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen2_vl": "Qwen2ForCausalLM",
        "qwen2_vl_text": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
        "qwen3_vl": "Qwen3ForCausalLM",
        "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
        "qwen3_vl_text": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
)
"""Model type of the text part -> the family that serves it."""

_SAID: Mapping[str, Raw] = MappingProxyType(
    {
        "glm4v_moe_text": {"attention_bias": True},
        "glm4v_text": {"attention_bias": True},
        "glm_ocr_text": {"partial_rotary_factor": 1.0},
        "qwen3_omni_moe_text": {"norm_topk_prob": True},
        "qwen3_vl_moe_text": {"norm_topk_prob": True},
    }
)
"""Fields that config.json may omit for one part."""

_SCALED = frozenset({"granite", "granite_docling_text", "hyperclovax"})
"""Text parts that scale their inputs, token embeddings and encoder vectors alike."""

_WHOLE = frozenset({"Gemma3ForConditionalGeneration"})
"""Models in which the tokens of an image attend to each other, also to later ones."""

_PREFIX = frozenset({"PaliGemmaForConditionalGeneration"})
"""Models in which all tokens of a prompt see each other (arXiv:2407.07726)."""

_PLACEHOLDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "image": ("image_token_id", "image_token_index"),
        "video": ("video_token_id", "video_token_index"),
        "audio": ("audio_token_id", "audio_token_index"),
    }
)


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    whole = architecture_of(raw)
    raw = {**raw, **(raw.get("thinker_config") or {}), "architectures": [whole]}
    text = text_part(raw)
    kind = str(text.get("model_type"))
    if kind not in _TEXTS:
        raise NotNative(f"a text part of type {kind}")
    if raw.get("has_lora_adapter"):
        raise NotNative("an adapter for audio only (has_lora_adapter)")
    inner = _TEXTS[kind]
    config = load_family(inner).parse(text | _SAID.get(kind, {}) | {"architectures": [inner]})
    deep = (raw.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
    max_tokens = _window(config) or config.max_position_embeddings
    media = ModelMedia(
        architecture=whole,
        token_ids=placeholders(raw),
        edited_layers=tuple(range(len(deep))),
        whole=whole in _WHOLE,
        prefix=max_tokens if whole in _PREFIX else 0,
        vector_scale=config.embed_scale if kind in _SCALED else 1.0,
    )
    if media.whole:
        _check_windows(raw, config)
    return msgspec.structs.replace(config, media=media, rope_axes=rope_axes(text, config), raw=text)


def placeholders(raw: Raw) -> dict[str, int]:
    """Placeholder token of each kind of media; some models name them in their parts' configs.

    Raises:
        ConfigError: There is none.
    """
    parts = [raw, *(raw.get(f"{part}_config") or {} for part in ("vision", "audio"))]
    tokens = {
        media: int(part[name])
        for part in reversed(parts)
        for media, names in _PLACEHOLDERS.items()
        for name in names
        if part.get(name) is not None
    }
    if not tokens:
        raise ConfigError("config.json: image_token_id, the placeholder of images, is missing")
    return tokens


def _check_windows(raw: Raw, config: ModelConfig) -> None:
    size, window = int(raw.get("mm_tokens_per_image") or 256), _window(config)
    if window and window < size:
        raise NotNative(f"images of {size} tokens in windows of {window}")


def _window(config: ModelConfig) -> int:
    """The smallest window of its layers; 0 if no layer has one."""
    return min((window for window in config.layer_windows if window is not None), default=0)


def rope_axes(text: Raw, config: ModelConfig) -> tuple[int, ...]:
    """Axis of each rotary angle: 0 time, 1 height, 2 width; empty for scalar positions.

    Raises:
        ConfigError: the sections do not add up to the angles of a head.
    """
    rule = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rule.get("mrope_section")
    if not sections:
        return ()
    angles = config.rope.rotary_dim(config.head_dim) // 2
    if sum(sections) != angles or len(sections) != 3:
        raise ConfigError(
            f"config.json: mrope_section {sections} does not divide the {angles} angles of a head "
            "among three axes"
        )
    if rule.get("mrope_interleaved"):
        axes = [0] * angles
        for axis in (1, 2):
            for place in range(axis, 3 * sections[axis], 3):
                axes[place] = axis
        return tuple(axes)
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


MODEL = Decoder  # unused: the config names the family whose class is used
