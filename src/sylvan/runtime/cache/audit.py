"""What an audit of the cache compares with what requests hold, and what it says.

A bug of ours that loses memory is to cost nobody a request, so owners are compared while serving.
What is compared is proportional to what requests hold, not to what is cached; only a difference
makes the whole tree be walked.
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
    """What was found without an owner, and taken back.

    `pages` of the allocator; `locks`: nodes of the tree that were locked more often, or less, than
    requests use them, or were not found for eviction; `states`: slots of recurrent state.
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
        """All of them together."""
        return self.pages + self.locks + self.states


def locks_of(ends: Iterable[Node]) -> dict[Node, int]:
    """How often each node is to be locked if every one of `ends` was; roots never are."""
    locks: dict[Node, int] = {}
    for end in ends:
        locks[end] = locks.get(end, 0) + 1
        node = end.parent
        while node is not None and node not in locks:
            locks[node] = 0
            node = node.parent
    # children begin after their parents: what ends at or below a node is known when its turn comes
    for node in sorted(locks, key=attrgetter("start"), reverse=True):
        if node.parent is not None:
            locks[node.parent] += locks[node]
    return {node: count for node, count in locks.items() if node.parent is not None}


def unowned(is_free: NDArray[np.bool_], owned: Iterable[IntArray]) -> IntArray:
    """Pages that are neither free nor among those of an owner."""
    for pages in owned:
        is_free[pages] = True
    return np.flatnonzero(~is_free).astype(np.int32)


def agrees(tree: PrefixCache, locks: Mapping[Node, int]) -> bool:
    """Whether `tree` has these locks and no others, without looking at unlocked nodes."""
    if any(node.locks != count for node, count in locks.items()):
        return False
    locked = sum(len(node.pages) for node in locks)
    return tree.total_pages - tree.evictable_pages == locked
