"""Loads the sources of `ngram` drafts besides requests: corpora and context trees."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.engine.text import load_tokenizer
from sylvan.runtime.features.speculation.contexts import FILE, ContextTree, load_contexts
from sylvan.runtime.features.speculation.corpus import GivenCorpora

GIVEN = "given"
"""Name of the configured corpus."""


def given_corpora(config: Config) -> GivenCorpora | None:
    """Load the corpora that `ngram` searches for all requests; None: `ngram` is not used.

    Raises:
        ConfigError: `speculative.corpus` is unreadable or too large.
    """
    section = config.speculative
    if section is None or section.algorithm != "ngram":
        return None
    found = GivenCorpora(section.corpus_tokens)
    if section.corpus is not None:
        try:
            found.add(GIVEN, _corpus_texts(config))
        except RequestError as error:
            raise ConfigError(f"speculative.corpus={section.corpus}: {error}") from None
    return found


def known_contexts(config: Config, vocab_size: int) -> ContextTree | None:
    """Load the context tree from the configured directory, or the model's.

    Raises:
        ConfigError: The configured one is invalid, or the one found is for another model.
    """
    section = config.speculative
    if section is None or section.algorithm != "ngram":
        return None
    if section.draft_model is not None:
        named = Path(section.draft_model).expanduser()
        try:
            return load_contexts(named, vocab_size)
        except ConfigError as error:
            raise ConfigError(f"speculative.draft_model={section.draft_model}: {error}") from None
    own = model_dir(config.model)
    return load_contexts(own, vocab_size) if (own / FILE).is_file() else None


def _corpus_texts(config: Config) -> Iterator[Sequence[int]]:
    """Yield the token IDs of each text in `speculative.corpus`, lazily; nothing if it is not set.

    Raises:
        ConfigError: The file is unreadable, or a line contains no text; the message names the line.
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
