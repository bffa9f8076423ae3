"""Least often used first, then least recently used."""

from __future__ import annotations

from sylvan.runtime.cache.types import Node


def key(node: Node) -> tuple[int, ...]:
    return (node.hits, node.last_used)
