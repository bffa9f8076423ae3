"""Separates thinking from answers, with the runtime's parsers."""

from __future__ import annotations

from typing import Any

from sylvan.text.reasoning import family, separate


def split_reasoning(model_type: str, value: Any, prompt: str) -> tuple[Any, Any]:
    """Thinking and answer of a text, or lists of them for several samples.

    Args:
        model_type: Name of a reasoning parser, e.g. "qwen3".
        value: The model's output.
        prompt: The text before it.

    Raises:
        ConfigError: there is no such parser.
    """
    if isinstance(value, list):
        splits = [split_reasoning(model_type, text, prompt) for text in value]
        return [thinking for thinking, _ in splits], [answer for _, answer in splits]
    parser = family(model_type)
    if parser is None:
        return "", value
    # A variable of the server's chat template, which the language does not use.
    switches = {} if parser.toggle is None else {parser.toggle[0]: False}
    return separate(value, parser, start_in_reasoning=parser.starts_in_reasoning(prompt, switches))
