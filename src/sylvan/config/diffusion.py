"""Settings of models that fill blocks of tokens by diffusion."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Count


class DiffusionConfig(Section, frozen=True):
    """How models that fill blocks by diffusion do it; requests may set the first two."""

    steps: Count | None = None
    """Most forward passes that a block takes; default: one for each of its tokens."""
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    """Probability from which on a predicted token is kept at once; below, the most likely ones go
    first. With 1 each pass keeps as few as `diffusion.steps` allows."""
    block: Count | None = None
    """Tokens of a block, for models that were trained for several sizes; default: the
    checkpoint's."""
    order: Literal["probability", "entropy", "margin"] = "probability"
    """Which open places go first: where the token is likely, where the model hesitates least
    between all tokens, or where the second best token is far behind."""
