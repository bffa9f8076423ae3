"""Human conversations in ShareGPT's format: first question, and length of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sylvan.bench.datasets.files import json_list
from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig

MIN_TOKENS = 2  # smallest prompt and answer: shorter ones measure nothing
_Messages = list[dict[str, object]]


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    """See `sylvan.bench.datasets.load`. Entries are shuffled, then taken until there are enough.

    Raises:
        ConfigError: The file has another format.
    """
    assert config.path is not None, "checked when the data set is chosen"
    pairs = [pair for _, entry in json_list(config.path) if (pair := _first_pair(entry))]
    pairs = pairs[config.offset :]
    prompts.rng.shuffle(pairs)
    made: list[BenchConversation] = []
    for question, answer in pairs:
        if len(made) == config.requests:
            break
        text, ids = prompts.with_suffix(question, prompts.encode(question))
        output = config.output_tokens or len(prompts.encode(answer))
        most = config.context_tokens
        fits = most is None or len(ids) + output <= most
        if len(ids) >= MIN_TOKENS and output >= MIN_TOKENS and fits:
            made.append(BenchConversation([BenchTurn(text, len(ids), output, ids)]))
    return made


def _first_pair(entry: dict[str, object]) -> tuple[str, str] | None:
    """Return the first two texts of a conversation."""
    messages = entry.get("conversations", entry.get("conversation"))
    if not isinstance(messages, list):
        return None
    texts = [m.get("value") for m in cast("_Messages", messages)[:2]]
    match texts:
        case [str(question), str(answer)]:
            return question, answer
        case _:
            return None
