"""Random texts of random lengths."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig

OUTPUT_TOKENS = 1024


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    made: list[BenchConversation] = []
    left = config.requests
    while left > 0:
        turns = [_turn(config, prompts) for _ in range(min(config.turns, left))]
        made.append(BenchConversation(turns))
        left -= len(turns)
    return made


def _turn(config: DataConfig, prompts: RandomPrompts) -> BenchTurn:
    output = prompts.length(config.output_tokens or OUTPUT_TOKENS, config.range_ratio)
    drawn = prompts.draw(prompts.length(config.input_tokens, config.range_ratio))
    text, ids = prompts.with_suffix(*drawn)
    return BenchTurn(text, len(ids), output, ids)
