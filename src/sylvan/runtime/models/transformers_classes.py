"""Finds the classes of a transformers model: in the library or in the checkpoint's code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvan.checkpoints.code import UNTRUSTED, load_class, named_class
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import architecture_of

_CONFIG, _MODEL = "AutoConfig", "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class TransformersClasses:
    """A config object, and the class of its causal model.

    `from_checkpoint`: whether the class comes with the checkpoint.
    """

    config: Any
    model: Any
    from_checkpoint: bool = False


def find_classes(raw: dict[str, Any], code: Path | None = None) -> TransformersClasses:
    """Find the classes of a model.

    Args:
        raw: config.json.
        code: Directory of the checkpoint, if its Python files may run.

    Raises:
        ConfigError: transformers is missing or lacks the model, or the checkpoint's code is
          needed and not trusted, or fails.
    """
    name = checkpoint_class(raw)
    if name is None:
        config = _config(raw, _known_config(raw, _MODEL))
        return TransformersClasses(config, _known_model(config))
    if code is None:
        raise ConfigError(f"it needs Python code of the checkpoint ({name}), {UNTRUSTED}")
    config_name = named_class(raw, _CONFIG)
    kind = load_class(code, config_name) if config_name else _known_config(raw, _CONFIG)
    return TransformersClasses(_config(raw, kind), load_class(code, name), from_checkpoint=True)


def checkpoint_class(raw: dict[str, Any]) -> str | None:
    """The causal model class in a checkpoint's code, if transformers has none of that name.

    Raises:
        ConfigError: transformers is missing.
    """
    try:
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN,
        )
    except ImportError:
        raise ConfigError("transformers, which may know it, is not installed") from None
    known = KNOWN.get(str(raw.get("model_type")), ())
    known = (known,) if isinstance(known, str) else known
    return None if architecture_of(raw) in known else named_class(raw, _MODEL)


def _known_config(raw: dict[str, Any], lacking: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        also = f", and auto_map in config.json lacks {lacking}" if raw.get("auto_map") else ""
        raise ConfigError(f"transformers has no model_type {kind!r}{also}")
    return CONFIG_MAPPING[kind]


def _known_model(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    if type(config) not in CAUSAL:
        raise ConfigError(f"transformers has no causal model of {type(config).__name__}")
    return CAUSAL[type(config)]


def _config(raw: dict[str, Any], kind: Any) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind.from_dict(_floats(raw))
    except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses its config.json: {reason}") from None


def _floats(value: Any) -> Any:
    """Convert numbers that JSON lacks, as transformers writes them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        found: Any = value  # pyright: ignore[reportUnknownVariableType]
        if set(found) == {"__float__"}:
            return float(found["__float__"])
        return {name: _floats(part) for name, part in found.items()}
    return [_floats(part) for part in value] if isinstance(value, list) else value
