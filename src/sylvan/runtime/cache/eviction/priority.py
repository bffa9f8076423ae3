"""Least urgent users first, then least recently used."""

from __future__ import annotations

from sylvan.runtime.cache.types import Node


def key(node: Node) -> tuple[int, ...]:
    return (node.priority, node.last_used)
