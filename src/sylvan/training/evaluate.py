"""How far a head guesses right where it was not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.config import Config
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.engine.build import build_scheduler
from sylvan.training.answers import eos_ids, request


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of speculation over some prompts.

    Attributes:
        accept_length: Tokens of a pass that verified guesses.
        accept_rate: Share of guesses that were right.
        tokens: Of all answers.
    """

    accept_length: float
    accept_rate: float
    tokens: int


def evaluate(config: Config, prompts: Sequence[IntArray], max_tokens: int) -> Evaluation:
    """Answer prompts greedily, with the speculation that the configuration names.

    Raises:
        ConfigError: the model or the head cannot be served.
    """
    built = build_scheduler(config, lambda outputs: None)
    longest, ends = int(built.facts["context_len"] or 0), eos_ids(config)
    try:
        for number, ids in enumerate(prompts):
            if len(ids) + max_tokens < longest:
                built.scheduler.add(request(str(number), ids, max_tokens, ends))
        while not built.scheduler.idle:
            built.scheduler.step()
        load = built.scheduler.load()
        return Evaluation(load.accept_length, load.accept_rate, load.generated_tokens)
    finally:
        built.close()
