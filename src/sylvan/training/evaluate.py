"""Measures how many drafts are accepted on prompts that were not used for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.config import Config
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.engine.build import build_scheduler
from sylvan.training.answers import eos_ids, greedy_request


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of speculation over some prompts.

    Attributes:
        accept_length: Mean tokens per forward pass that verified drafts.
        accept_rate: Share of drafts that were accepted.
        tokens: Tokens of all answers.
    """

    accept_length: float
    accept_rate: float
    tokens: int


def evaluate(config: Config, prompts: Sequence[IntArray], max_tokens: int) -> Evaluation:
    """Answer prompts greedily, with the speculation in the configuration.

    Raises:
        ConfigError: The model or the head cannot be served.
    """
    built = build_scheduler(config, lambda outputs: None)
    longest, ends = int(built.facts["context_len"] or 0), eos_ids(config)
    try:
        for number, ids in enumerate(prompts):
            if len(ids) + max_tokens < longest:
                built.scheduler.add(greedy_request(str(number), ids, max_tokens, ends))
        while not built.scheduler.idle:
            built.scheduler.step()
        load = built.scheduler.load()
        return Evaluation(load.accept_length, load.accept_rate, load.generated_tokens)
    finally:
        built.close()
