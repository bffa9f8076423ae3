"""Text parts of multimodal models without a native family.

The text part is a causal model of transformers, served as in `fallback`. Vectors of items replace
outputs of its embedding module. Other uses of ids see the padding id there, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelMedia, architecture_of
from sylvan.runtime.models.multimodal import placeholders

Raw = dict[str, Any]

SERVED = frozenset({"gemma4", "gemma4_unified"})
"""Model types whose encoder vectors replace embeddings and change nothing else."""
TEXT_ONLY = frozenset({"gemma3n"})
"""Model types that are served for text only.

Gemma 3n's image encoder is a timm network, and its image and audio tokens have separate tables.
"""
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        r"^(model\.)?language_model\.lm_head\.": "lm_head.",
        r"^language_model\.model\.": "model.",
        r"^model\.language_model\.": "model.",
    }
)
"""Patterns of tensor names in such checkpoints -> names in a text-only checkpoint."""
_OF_ALL = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class MediaText:
    """config.json of the text part, and the model's other inputs."""

    raw: Raw
    media: ModelMedia


def media_text(raw: Raw) -> MediaText | None:
    """Split config.json of a multimodal model; None: not multimodal, or not supported.

    Raises:
        ConfigError: transformers has no causal model of the text part, or items do more than
            replace embeddings.
    """
    if raw.get("model_type") not in SERVED | TEXT_ONLY or not raw.get("text_config"):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    try:
        config: Any = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses its config.json: {reason}") from None
    text = config.get_text_config()
    if type(text) not in CAUSAL:
        raise ConfigError(f"transformers has no causal model of {type(text).__name__}")
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if bidirectional not in {None, "vision"}:
        raise ConfigError(f"it has use_bidirectional_attention {bidirectional!r}")
    said = {name: raw[name] for name in _OF_ALL if raw.get(name) is not None}
    model: Any = CAUSAL[type(text)]
    found: Raw = text.to_dict() | said | {"architectures": [model.__name__]}
    kinds = {
        kind: token
        for kind, token in placeholders(raw).items()
        if raw.get("audio_config" if kind == "audio" else "vision_config")
        and raw["model_type"] in SERVED
    }
    media = ModelMedia(
        architecture=architecture_of(raw),
        token_ids=kinds,
        whole=bidirectional == "vision",
        windows_only=bidirectional == "vision",
    )
    return MediaText(found, media)
