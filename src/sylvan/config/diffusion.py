"""Settings of models that generate blocks of tokens by diffusion."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Count


class DiffusionConfig(Section, frozen=True):
    """Block diffusion; requests may override the first two settings."""

    steps: Count | None = None
    """Largest number of forward passes per block; default: one per token of the block."""
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    """Probability from which on a predicted token is kept at once; below, the most likely ones go
    first. With 1 each pass keeps as few as `diffusion.steps` allows."""
    block: Count | None = None
    """Tokens of a block, for models that were trained for several sizes; default: the
    checkpoint's."""
    order: Literal["probability", "entropy", "margin"] = "probability"
    """Which masked positions are filled first: those with the most probable token, with the lowest
    entropy over the vocabulary, or with the largest margin to the second best token."""
