"""Segmented LRU: entries used at least twice are protected; least recently used first in each."""

from __future__ import annotations

from sylvan.runtime.cache.types import Node

PROTECTED_HITS = 2


def key(node: Node) -> tuple[int, ...]:
    return (int(node.hits >= PROTECTED_HITS), node.last_used)
