"""Random texts of drawn lengths."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.bench.datasets.prompts import Prompts
from sylvan.bench.workload import Conversation, Turn
from sylvan.config.bench import DataConfig

OUTPUT_TOKENS = 1024


def load(config: DataConfig, prompts: Prompts) -> Sequence[Conversation]:
    """See `sylvan.bench.datasets.load`."""
    made: list[Conversation] = []
    left = config.requests
    while left > 0:
        turns = [_turn(config, prompts) for _ in range(min(config.turns, left))]
        made.append(Conversation(turns))
        left -= len(turns)
    return made


def _turn(config: DataConfig, prompts: Prompts) -> Turn:
    output = prompts.length(config.output_tokens or OUTPUT_TOKENS, config.range_ratio)
    drawn = prompts.draw(prompts.length(config.input_tokens, config.range_ratio))
    text, ids = prompts.with_suffix(*drawn)
    return Turn(text, len(ids), output, ids)
