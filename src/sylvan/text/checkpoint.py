"""Reads the tokenizer files of a checkpoint directory in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.text.published_chat import TEMPLATES
from sylvan.text.tokenizer_conversion import foreign_tokenizer
from sylvan.utils.json_files import read_json


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Text-related files of a checkpoint.

    Attributes:
        tokenizer_json: Content of tokenizer.json, or converted from other files; None if neither.
        config: Content of tokenizer_config.json.
        templates: Chat templates by name; the default one is called "default".
        eos_ids: End tokens in the model and generation configs.
        bos_id: Start token in these configs.
        pad_id: Padding token in these configs.
        architecture: First entry of `architectures`, or "".
        model_type: `model_type` of config.json, or "".
        max_tokens: Maximum length of an embedder, if sentence-transformers' files define it.
    """

    tokenizer_json: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    architecture: str = ""
    model_type: str = ""
    max_tokens: int | None = None


def read_files(model_dir: str | Path) -> TokenizerFiles:
    """Read all text-related files.

    Raises:
        ConfigError: The directory is missing, or one of the files is not valid JSON.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ConfigError(f"Model directory {folder} does not exist, so there is no tokenizer.")
    config = _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json")
    inner = model.get("text_config", model.get("llm_config"))
    generation = _read_json(folder / "generation_config.json")
    sources = [generation, model, inner if isinstance(inner, dict) else {}]
    architecture = str(next(iter(model.get("architectures") or ()), ""))
    path = folder / "tokenizer.json"
    return TokenizerFiles(
        tokenizer_json=_read_text(path)
        if path.is_file()
        else foreign_tokenizer(folder, config, model),
        config=config,
        templates=_read_templates(folder, config) or _published(architecture),
        eos_ids=_ids("eos_token_id", sources),
        bos_id=next(iter(_ids("bos_token_id", sources)), None),
        pad_id=next(iter(_ids("pad_token_id", sources)), None),
        architecture=architecture,
        model_type=str(model.get("model_type") or ""),
        max_tokens=_max_tokens(folder),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect chat templates; separate files override tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    for value in (config.get("chat_template"), legacy):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates.update({entry["name"]: entry["template"] for entry in value})
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = _read_text(single)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _published(architecture: str) -> dict[str, str]:
    """The template of a checkpoint without one, if its published code has one."""
    found = TEMPLATES.get(architecture)
    return {} if found is None else {"default": found}


def _max_tokens(folder: Path) -> int | None:
    """`max_seq_length` from a file named after the kind of model (`sentence_bert_config.json`)."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        found = _read_json(path).get("max_seq_length")
        if isinstance(found, int) and found > 0:
            return found
    return None


def _ids(key: str, sources: list[dict[str, Any]]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get(key)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                found[token] = None
    return tuple(found)
