"""Texts for commands that run a model over some: out of a file, or made by the model itself."""

from __future__ import annotations

from pathlib import Path

from sylvan.protocol.errors import ConfigError


def read_text(option: str, name: str) -> str:
    """The text of the file that an option names.

    Raises:
        ConfigError: it cannot be read, or is no UTF-8.
    """
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{option}: cannot read {name!r}: {error}") from None


def windows(option: str, text: str, path: Path, window: int, tokens: int) -> list[list[int]]:
    """The text cut into windows; one of a single token, which predicts nothing, is left out.

    Args:
        option: Which option gave the text.
        text: At most its first `tokens` tokens are used.
        path: The model, whose tokenizer is used.
        window: Tokens of a window.
        tokens: See `text`.

    Raises:
        ConfigError: the text has no two tokens.
    """
    from sylvan.text.tokenizer import Tokenizer  # takes a while

    ids = Tokenizer.load(path).encode(text)[:tokens]
    found = [ids[start : start + window] for start in range(0, len(ids), window)]
    found = [part for part in found if len(part) > 1]
    if not found:
        raise ConfigError(f"--{option}: the text has no two tokens")
    return found


def generated(model: Path, window: int, tokens: int) -> list[list[int]]:
    """Texts that a model writes by itself, each from another first token; the same every time."""
    from sylvan.config.checkpoint import vocabulary_rows
    from sylvan.runtime.engine.engine import Engine  # brings torch

    count, rows = max(1, tokens // window), vocabulary_rows(model) or 2
    firsts = [[1 + (number * rows) // (count + 1)] for number in range(count)]
    length = {"max_new_tokens": window - 1, "ignore_eos": True}
    options = [{"temperature": 1.0, "sampling_seed": number, **length} for number in range(count)]
    with Engine(model=str(model)) as engine:
        answers = engine.generate(input_ids=firsts, sampling_params=options)
    assert isinstance(answers, list)
    pairs = zip(firsts, answers, strict=True)
    return [[*first, *(int(n) for n in answer["output_ids"])] for first, answer in pairs]
