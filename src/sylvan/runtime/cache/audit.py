"""Compares the cache's accounts with what requests hold, and describes the differences.

A bug that leaks memory must not fail requests, so ownership is checked during serving. The check
costs time in proportion to what requests hold, not to what is cached; only a difference triggers a
walk over the whole tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.prefix import PrefixCache
from sylvan.runtime.cache.types import Node


@dataclass(frozen=True, slots=True)
class Repairs:
    """Resources without an owner that an audit reclaimed.

    `pages`: pages of the allocator; `locks`: tree nodes with a wrong lock count, or missing from
    the eviction heap; `states`: slots of recurrent state.
    """

    pages: int = 0
    locks: int = 0
    states: int = 0

    def __add__(self, other: Repairs) -> Repairs:
        return Repairs(
            self.pages + other.pages, self.locks + other.locks, self.states + other.states
        )

    @property
    def total(self) -> int:
        """Sum of all counts."""
        return self.pages + self.locks + self.states


def locks_of(ends: Iterable[Node]) -> dict[Node, int]:
    """Expected lock count of each node if every one of `ends` is locked; roots have none."""
    locks: dict[Node, int] = {}
    for end in ends:
        locks[end] = locks.get(end, 0) + 1
        node = end.parent
        while node is not None and node not in locks:
            locks[node] = 0
            node = node.parent
    # children start after their parents, so this order visits all nodes below a node before it
    for node in sorted(locks, key=attrgetter("start"), reverse=True):
        if node.parent is not None:
            locks[node.parent] += locks[node]
    return {node: count for node, count in locks.items() if node.parent is not None}


def unowned(is_free: NDArray[np.bool_], owned: Iterable[IntArray]) -> IntArray:
    """Pages that are neither free nor owned."""
    for pages in owned:
        is_free[pages] = True
    return np.flatnonzero(~is_free).astype(np.int32)


def locks_match(tree: PrefixCache, locks: Mapping[Node, int]) -> bool:
    """Whether `tree` has exactly these locks; does not visit unlocked nodes."""
    if any(node.locks != count for node, count in locks.items()):
        return False
    locked = sum(len(node.pages) for node in locks)
    return tree.total_pages - tree.evictable_pages == locked
