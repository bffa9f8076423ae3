"""Visual document retrievers with a vector per token (late interaction, arXiv:2407.01449).

ColPali, ColQwen2, and ColModernVBERT, which is an encoder (arXiv:2510.01149).

A vision model (`vlm_config`) without its LM head, whose family serves the layers; a projection
reduces the dimension of token vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models import encoder_config, multimodal
from sylvan.runtime.models.config import ModelConfig, ModelMedia, NotNative, architecture_of
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.token_heads import Transform

Raw = dict[str, Any]

_INSIDE: Mapping[str, str] = MappingProxyType(
    {
        "modernvbert": "ModernBertModel",
        "paligemma": "PaliGemmaForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
    }
)
"""Model type of `vlm_config` -> its architecture."""
_PROJECTION = "embedding_proj_layer"


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of a `...ForRetrieval`.

    Raises:
        ConfigError: The model in `vlm_config` is not supported.
    """
    inner = raw.get("vlm_config") or {}
    kind = str(inner.get("model_type"))
    if kind not in _INSIDE:
        raise NotNative(f"retrieval with a model of type {kind}")
    if kind == "modernvbert":
        config = encoder_config.parse(inner["text_config"] | {"architectures": [_INSIDE[kind]]})
        media = ModelMedia(
            architecture=architecture_of(raw), token_ids={"image": int(inner["image_token_id"])}
        )
    else:
        config = multimodal.parse(inner | {"architectures": [_INSIDE[kind]]})
        assert config.media is not None, "a vision model has media inputs"
        media = msgspec.structs.replace(config.media, architecture=architecture_of(raw))
    return msgspec.structs.replace(config, media=media, head="none", tie_word_embeddings=False)


def is_retriever(config: ModelConfig) -> bool:
    """Whether a config describes one of these retrievers."""
    return config.media is not None and config.media.architecture.endswith("ForRetrieval")


def projection(model_dir: Path) -> Transform:
    """Projects token vectors to fewer columns.

    Raises:
        ConfigError: the checkpoint lacks it.
    """
    checkpoint = Checkpoint(model_dir)
    names = [f"{_PROJECTION}.{part}" for part in ("weight", "bias")]
    if lacks := [name for name in names if name not in checkpoint.tensors]:
        raise ConfigError(f"the checkpoint has no tensor {lacks[0]}")
    weight, bias = (checkpoint.tensor(name).float() for name in names)
    return lambda x: F.linear(x, weight, bias)


MODEL = Decoder  # unused: the config names the family whose class is used
