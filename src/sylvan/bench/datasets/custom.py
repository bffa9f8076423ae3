"""Requests from a custom JSONL file.

Each line has `prompt` (text), `messages` (OpenAI's) or `conversations` (`content` or `value` of
each), and may have `output_tokens` (or `max_tokens`) and `extra` (fields of the request).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from sylvan.bench.datasets.files import json_lines, positive
from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig
from sylvan.protocol.errors import ConfigError

OUTPUT_TOKENS = 256
_LENGTHS = ("output_tokens", "max_tokens", "max_completion_tokens", "max_new_tokens")


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    """See `sylvan.bench.datasets.load`. Keeps the order of lines.

    Raises:
        ConfigError: A line has another format.
    """
    assert config.path is not None, "checked when the data set is chosen"
    made: list[BenchConversation] = []
    for number, (where, entry) in enumerate(json_lines(config.path)):
        if len(made) == config.requests:
            break
        if number < config.offset:
            continue
        turn = _turn(where, entry, config, prompts)
        if config.context_tokens is None or (
            turn.prompt_tokens + turn.output_tokens <= config.context_tokens
        ):
            made.append(BenchConversation([turn]))
    return made


def _turn(
    where: str, entry: dict[str, object], config: DataConfig, prompts: RandomPrompts
) -> BenchTurn:
    messages, answer = _messages(where, entry)
    question = entry.get("prompt") if not messages else _joined(messages)
    if not isinstance(question, str) or not question:
        raise ConfigError(f"{where}: expected prompt, messages or conversations")
    text, ids = prompts.with_suffix(question, prompts.encode(question))
    extra = entry.get("extra")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f"{where}: extra must be a JSON object")
    return BenchTurn(
        text,
        len(ids),
        _output_tokens(where, entry, config, prompts, answer),
        ids,
        messages,
        cast("Mapping[str, object] | None", extra),
    )


def _output_tokens(
    where: str, entry: dict[str, object], config: DataConfig, prompts: RandomPrompts, answer: str
) -> int:
    if config.output_tokens is not None:
        return config.output_tokens
    for name in _LENGTHS:
        if name in entry:
            return positive(entry[name], where, name)
    return max(1, len(prompts.encode(answer))) if answer else OUTPUT_TOKENS


def _messages(where: str, entry: dict[str, object]) -> tuple[list[dict[str, object]], str]:
    """Return messages up to the last one of the user, and the answer that follows it, if any."""
    if isinstance(entry.get("messages"), list):
        return cast("list[dict[str, object]]", entry["messages"]), ""
    messages = entry.get("conversations")
    if messages is None:
        return [], ""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: conversations must be a list of messages")
    texts = [m.get("content", m.get("value")) for m in cast("list[dict[str, object]]", messages)]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: each of conversations needs a text (content or value)")
    answer = str(texts.pop()) if len(texts) % 2 == 0 else ""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], answer


def _joined(messages: Sequence[Mapping[str, object]]) -> str:
    """Join the texts of messages, for APIs with a prompt."""
    return "\n\n".join(str(message.get("content") or "") for message in messages)
