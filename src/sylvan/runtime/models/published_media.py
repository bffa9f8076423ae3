"""Vision models whose published layouts transformers lacks.

DeepSeek-VL2, InternVL, Kimi-VL, MiniCPM-V and Phi-3-Vision. Text families serve their text parts;
their encoders are in `features.multimodal.published`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig, ModelMedia, NotNative, architecture_of
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.image_tokens import TOKEN
from sylvan.runtime.models.registry import load_family

Raw = dict[str, Any]

_INTERNVL = frozenset(
    {
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Text parts of InternVL that are served."""


def parse(raw: Raw) -> ModelConfig:
    """Read config.json, with the placeholder of images (`image_tokens`).

    Raises:
        ConfigError: it has a switch that is not served.
    """
    architecture = architecture_of(raw)
    text, inner = _text(raw, architecture)
    token = raw.get("media_placeholder_token_id", raw.get(TOKEN))
    if token is None:
        raise ConfigError(f"config.json: {TOKEN} is missing")
    config = load_family(inner).parse(text | {"architectures": [inner]})
    media = ModelMedia(architecture=architecture, token_ids={"image": int(token)})
    return msgspec.structs.replace(config, media=media, raw=text)


def _text(raw: Raw, architecture: str) -> tuple[Raw, str]:
    """config.json of the text part, and its architecture."""
    if architecture == "KimiVLForConditionalGeneration":
        return raw["text_config"], "DeepseekV3ForCausalLM"
    if architecture == "InternVLChatModel":
        return _internvl(raw)
    if architecture == "Phi3VForCausalLM":
        return raw, "Phi3ForCausalLM"
    if architecture == "MiniCPMV":
        if float(raw.get("version") or 0) != 2.6:
            raise NotNative(f"version {raw.get('version')!r} of MiniCPM-V")
        return raw, "Qwen2ForCausalLM"
    return _deepseek(raw["language_config"])


def _internvl(raw: Raw) -> tuple[Raw, str]:
    text: Raw = raw.get("llm_config") or {}
    name = architecture_of(text)
    if name not in _INTERNVL:
        raise NotNative(f"InternVL with the text part {name}")
    return text, name


def _deepseek(text: Raw) -> tuple[Raw, str]:
    if text.get("topk_method") == "noaux_tc":
        return text, "DeepseekV3ForCausalLM"
    latent = text.get("use_mla", True)
    return text, "DeepseekV2ForCausalLM" if latent else "DeepseekForCausalLM"


MODEL = Decoder  # unused: the config names the family whose class is used
