"""Newest first."""

from __future__ import annotations

from sylvan.runtime.cache.types import Node


def key(node: Node) -> tuple[int, ...]:
    return (-node.created,)
