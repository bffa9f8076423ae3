"""Leaves of the prefix tree that may be evicted, in the order of the policy."""

from __future__ import annotations

import heapq
from typing import Any

from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.types import Node

SLACK = 1024  # void entries tolerated before a rebuild


class Leaves:
    """A heap in which each leaf stands once.

    A leaf that is offered again, because it was used meanwhile, keeps its place until that comes up
    and is moved then: under most policies use can only put eviction off. Where it brings it nearer
    (mru), the leaf gets another entry and the first is void.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Any, ...]] = []  # (*rank, number of the offer, node)
        self._offers = 0
        self._void = 0  # entries that mean nothing any more

    def offer(self, node: Node) -> None:
        """`node` may be evicted from now on, unless it is locked or has children."""
        if node.locks or node.children:
            return
        self._offers += 1
        node.offered = self._offers
        rank = self._policy(node)
        if node.queued:
            if rank >= node.rank:
                return
            self.forget(node)
        self._push(node, rank)

    def forget(self, node: Node) -> None:
        """`node` is not in the tree any more."""
        if not node.queued:
            return
        node.queued = 0
        self._void += 1
        if self._void > len(self._heap) // 2 + SLACK:
            self._heap = [entry for entry in self._heap if entry[-2] == entry[-1].queued]
            heapq.heapify(self._heap)
            self._void = 0

    def pop(self) -> Node | None:
        """The next leaf to evict, or None; it is to be offered again if it stays."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            number, node = entry[-2], entry[-1]
            if number != node.queued:
                self._void -= 1
                continue
            node.queued = 0
            if node.locks or node.children:
                continue
            if number == node.offered:
                return node
            self._push(node, self._policy(node))
        return None

    def _push(self, node: Node, rank: tuple[int, ...]) -> None:
        node.rank, node.queued = rank, node.offered
        heapq.heappush(self._heap, (*rank, node.offered, node))
