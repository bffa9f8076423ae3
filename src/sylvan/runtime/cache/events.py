"""What happened to the prefix tree, for those who follow it from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.types import CacheKey


@dataclass(frozen=True, slots=True, eq=False)
class TreeEvent:
    """The tokens of `key` from position `start` on were inserted or evicted."""

    kind: Literal["insert", "evict"]
    key: CacheKey
    start: int

    @property
    def tokens(self) -> IntArray:
        """What was inserted or evicted."""
        return self.key.tokens[self.start :]
