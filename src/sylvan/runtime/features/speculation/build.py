"""From the configuration to the capability."""

from __future__ import annotations

from sylvan.config.tree import SpeculativeConfig
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.ngram import NgramDrafter


def build_speculation(config: SpeculativeConfig, vocab_size: int) -> Speculation:
    """The control half of a resolved and checked section."""
    most = config.num_steps
    assert isinstance(most, int), "a resolved section has no auto"
    return Speculation(
        NgramDrafter(config.min_match, config.max_match),
        most,
        vocab_size,
        adaptive=config.adaptive,
    )
