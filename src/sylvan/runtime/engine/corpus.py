"""Reads the texts that `speculative.corpus` names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sylvan.config import Config
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.text import load_tokenizer


def corpus_texts(config: Config) -> Iterator[Sequence[int]]:
    """Token ids of each text of `speculative.corpus`, read as they are asked for; none without it.

    Raises:
        ConfigError: the file cannot be read, or a line holds no text; names the line.
    """
    given = config.speculative
    if given is None or given.corpus is None:
        return
    path = Path(given.corpus).expanduser()
    tokenizer = load_tokenizer(config)
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    for text in _texts(line, path, number):
                        yield tokenizer.encode(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"speculative.corpus={given.corpus} cannot be read: {error}") from None


def _texts(line: str, path: Path, number: int) -> list[str]:
    if path.suffix != ".jsonl":
        return [line.rstrip("\n")]
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        found = found.get("text", found.get("documents"))
    texts = found if isinstance(found, list) else [found]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"speculative.corpus={path}, line {number}: a line is a string, or an object with "
            "text, or with a list of documents"
        )
    return texts
