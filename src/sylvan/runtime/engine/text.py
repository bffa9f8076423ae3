"""Tokenizer and chat template of a configuration."""

from __future__ import annotations

from pathlib import Path

from sylvan.checkpoints.gguf.view import gguf_file
from sylvan.config import Config
from sylvan.config.checkpoint import fetched, model_dir, vocabulary_rows
from sylvan.protocol.errors import ConfigError
from sylvan.text.tokenizer import Tokenizer


def tokenizer_dir(config: Config) -> Path:
    """Return the directory of the tokenizer.

    Raises:
        ConfigError: It does not exist.
    """
    if config.tokenizer is None:
        return model_dir(config.model)
    path = fetched(config.tokenizer)
    return model_dir(str(path)) if gguf_file(path) else path


def load_tokenizer(config: Config, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer.

    Args:
        config: Names the model.
        chat_template: Template text that replaces the checkpoint's; not needed by processes that
            render no prompts.

    Raises:
        ConfigError: It is missing or invalid, or has tokens that the model lacks.
    """
    tokenizer = read_tokenizer(config, chat_template)
    check_vocabulary(tokenizer, model_dir(config.model))
    return tokenizer


def read_tokenizer(config: Config, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer without checking it against the model."""
    return Tokenizer.load(
        tokenizer_dir(config), chat_template=chat_template, trusted=config.trust_remote_code
    )


def read_chat_template(config: Config) -> str | None:
    """Read the configured chat template; None: the checkpoint's is used.

    Raises:
        ConfigError: The file does not exist, or is not a template.
    """
    choice = config.text.chat_template
    if choice is None:
        return None
    from sylvan.text.chat_template import resolve_template  # imports Jinja

    return resolve_template(choice)


def check_vocabulary(tokenizer: Tokenizer, model: Path) -> str:
    """Check that the model has a row for every token; return the number of rows.

    A padding token, which no text becomes, may exceed it: some checkpoints are like that.

    Raises:
        ConfigError: Tokenizer and model do not match.
    """
    rows = vocabulary_rows(model)
    last = tokenizer.vocab_size - 1
    if rows is None or last < rows or (last == rows and last == tokenizer.pad_id):
        return f"{tokenizer.vocab_size} token IDs, {rows or 'an unknown number of'} embedding rows"
    raise ConfigError(
        f"tokenizer: token {tokenizer.token_name(last)!r} has ID {last}, but the model has only "
        f"{rows} embedding rows (vocab_size in config.json); give its own tokenizer (--tokenizer)"
    )
