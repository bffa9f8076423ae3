"""What happened to the prefix tree, for those who follow it from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.types import CacheKey, Node, Place


@dataclass(frozen=True, slots=True, eq=False)
class TreeEvent:
    """The tokens of `key` from position `start` on were inserted into a place, or evicted there."""

    kind: Literal["insert", "evict"]
    key: CacheKey
    start: int
    place: Place = Place.DEVICE

    @property
    def tokens(self) -> IntArray:
        """What was inserted or evicted."""
        return self.key.tokens[self.start :]


def event(
    kind: Literal["insert", "evict"],
    path: Sequence[Node],
    start: int,
    place: Place = Place.DEVICE,
) -> TreeEvent:
    """What happened from position `start` on to the end of a path from below the root."""
    tokens = np.concatenate([node.tokens for node in path])
    media = tuple({span: None for node in path for span in node.media})
    return TreeEvent(kind, CacheKey(tokens, path[-1].namespace, media), start, place)
