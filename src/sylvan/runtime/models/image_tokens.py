"""Placeholders of images that config.json leaves to the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import IMAGE_TOKENS
from sylvan.utils.json_files import read_json

TOKEN = "image_token_id"


def with_image_token(raw: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Add the number of a placeholder that only the tokenizer knows to config.json.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    names = raw.get("architectures") or [""]
    text = IMAGE_TOKENS.get(str(names[0]))
    if text is None or raw.get(TOKEN) is not None:
        return raw
    try:
        found: Any = read_json(model_dir / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from None
    for entry in found.get("added_tokens") or ():
        if entry.get("content") == text:
            return raw | {TOKEN: entry["id"]}
    raise ConfigError(f"tokenizer.json has no token {text}, which stands for images")
