"""What happened to the prefix tree, for those who follow it from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TreeEvent:
    """A run of tokens was inserted at, or evicted from, position `start` of a namespace."""

    kind: Literal["insert", "evict", "clear"]
    namespace: str
    start: int
    tokens: IntArray
