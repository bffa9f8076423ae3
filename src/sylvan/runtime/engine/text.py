"""The text side of a configuration."""

from __future__ import annotations

from pathlib import Path

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.text.tokenizer import Tokenizer


def tokenizer_dir(config: Config) -> Path:
    """Where the tokenizer is.

    Raises:
        ConfigError: there is no such directory.
    """
    return model_dir(config.model) if config.tokenizer is None else Path(config.tokenizer)


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the model.

    Raises:
        ConfigError: it is missing or broken.
    """
    return Tokenizer.load(tokenizer_dir(config))
