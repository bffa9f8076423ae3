"""The data sets of load tests; one module each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from sylvan.bench.datasets import (
    custom,
    images,
    random_prompts,
    shared_prefix,
    sharegpt,
    trace,
)
from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation
from sylvan.config.bench import DataConfig
from sylvan.protocol.errors import ConfigError
from sylvan.text.tokenizer import Tokenizer

_FROM_FILE = ("sharegpt", "custom", "trace")
_LOADERS: Mapping[str, Callable[[DataConfig, RandomPrompts], Sequence[BenchConversation]]] = {
    "random": random_prompts.load,
    "shared-prefix": shared_prefix.load,
    "image": images.load,
    "sharegpt": sharegpt.load,
    "custom": custom.load,
    "trace": trace.load,
}


def load(config: DataConfig, tokenizer: Tokenizer) -> Sequence[BenchConversation]:
    """Load the conversations of a load test, reproducibly by seed.

    Raises:
        ConfigError: The file is missing, unreadable or malformed, or contains nothing that fits.
    """
    if (config.dataset in _FROM_FILE) is (config.path is None):
        needs = "needs" if config.path is None else "takes no"
        raise ConfigError(f"data.dataset {config.dataset} {needs} data.path")
    rng = random.Random(config.seed)
    found = _LOADERS[config.dataset](config, RandomPrompts(tokenizer, rng, config.suffix))
    if not found:
        raise ConfigError(f"{config.path}: no entry fits (data.offset, data.context_tokens)")
    return found
