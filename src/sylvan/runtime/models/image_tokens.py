"""Finds image placeholder tokens that only the tokenizer knows, not config.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import IMAGE_TOKENS
from sylvan.utils.json_files import read_json

TOKEN = "image_token_id"


def with_image_token(raw: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Add the id of a placeholder that only the tokenizer knows to config.json.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    names = raw.get("architectures") or [""]
    text = IMAGE_TOKENS.get(str(names[0]))
    if text is None or raw.get(TOKEN) is not None:
        return raw
    for token, content in _added(model_dir):
        if content == text:
            return raw | {TOKEN: token}
    raise ConfigError(f"the tokenizer has no token {text}, the placeholder of images")


def _added(model_dir: Path) -> Iterator[tuple[int, str]]:
    """Added tokens by id, from tokenizer.json or else from tokenizer_config.json."""
    name = "tokenizer.json" if (model_dir / "tokenizer.json").is_file() else "tokenizer_config.json"
    try:
        found: Any = read_json(model_dir / name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    for entry in found.get("added_tokens") or ():
        yield int(entry["id"]), str(entry.get("content"))
    for token, entry in (found.get("added_tokens_decoder") or {}).items():
        yield int(token), str(entry.get("content"))
