"""Groups of conversations that share a system prompt.

After the benchmark of SGLang v0.4's cache-aware load balancer.
"""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig

OUTPUT_TOKENS = 256


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    """Load the data set; ignores `data.requests`."""
    made: list[BenchConversation] = []
    for _ in range(config.groups):
        system = prompts.draw(prompts.length(config.system_tokens, config.range_ratio))
        made += [
            BenchConversation([_turn(config, prompts, system), *_more(config, prompts)])
            for _ in range(config.prompts_per_group)
        ]
    if not config.ordered:
        prompts.rng.shuffle(made)
    return made


def _turn(config: DataConfig, prompts: RandomPrompts, before: tuple[str, list[int]]) -> BenchTurn:
    text, ids = prompts.draw(prompts.length(config.question_tokens, config.range_ratio))
    whole, whole_ids = prompts.with_suffix(f"{before[0]}\n\n{text}" if before[0] else text, ids)
    if before[0]:
        whole_ids = [*before[1], *prompts.encode("\n\n"), *whole_ids]
    output = prompts.length(config.output_tokens or OUTPUT_TOKENS, config.range_ratio)
    return BenchTurn(whole, len(whole_ids), output, whole_ids)


def _more(config: DataConfig, prompts: RandomPrompts) -> list[BenchTurn]:
    return [_turn(config, prompts, ("", [])) for _ in range(config.turns - 1)]
