"""The evictable leaves of the prefix tree, in eviction order."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Any, Protocol

from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.types import Node

SLACK = 1024  # void entries tolerated before a rebuild


class EvictionOrder(Protocol):
    """The evictable leaves of a tree, next to be evicted first."""

    def push(self, node: Node) -> None:
        """Make `node` a candidate for eviction, unless it is locked or has children."""
        ...

    def forget(self, node: Node) -> None:
        """Remove `node` from the candidates for eviction."""
        ...

    def holds(self, node: Node) -> bool:
        """Whether `pop` could return this node."""
        ...

    def pop(self) -> Node | None:
        """The next leaf to evict, or None; push it again if it stays."""
        ...


class EvictionHeap:
    """A lazy heap: each leaf has at most one live entry.

    A leaf that was used after its push keeps its entry and is re-ranked when popped: under most
    policies, use only raises the rank. Where use lowers the rank (mru), the leaf gets a new entry
    and the old one is void.
    """

    def __init__(self, policy: EvictionPolicy, *, tiered: bool = False) -> None:
        """`tiered`: a node counts as a leaf if no child has pages on the device."""
        self._policy, self._tiered = policy, tiered
        self._heap: list[tuple[Any, ...]] = []  # (*rank, number of the push, node)
        self._pushes = 0
        self._void = 0  # entries that are not live

    def push(self, node: Node) -> None:
        """Make `node` a candidate for eviction, unless it is locked or has children."""
        if node.locks or (node.children and not (self._tiered and _is_leaf(node))):
            return
        self._pushes += 1
        node.pushes = self._pushes
        rank = self._policy(node)
        if node.queued:
            if rank >= node.rank:
                return
            self.forget(node)
        self._insert(node, rank)

    def forget(self, node: Node) -> None:
        """Remove `node` from the candidates for eviction."""
        if not node.queued:
            return
        node.queued = 0
        self._void += 1
        if self._void > len(self._heap) // 2 + SLACK:
            self._heap = [entry for entry in self._heap if entry[-2] == entry[-1].queued]
            heapq.heapify(self._heap)
            self._void = 0

    def __len__(self) -> int:
        """Upper bound of the number of nodes that `pop` may return."""
        return len(self._heap) - self._void

    def holds(self, node: Node) -> bool:
        """Whether `pop` could return this node."""
        return node.queued > 0

    def pop(self) -> Node | None:
        """The next leaf to evict, or None; push it again if it stays."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            number, node = entry[-2], entry[-1]
            if number != node.queued:
                self._void -= 1
                continue
            node.queued = 0
            if node.locks or (node.children and not (self._tiered and _is_leaf(node))):
                continue
            if number == node.pushes:
                return node
            self._insert(node, self._policy(node))
        return None

    def _insert(self, node: Node, rank: tuple[int, ...]) -> None:
        node.rank, node.queued = rank, node.pushes
        heapq.heappush(self._heap, (*rank, node.pushes, node))


class StagedHeap:
    """Stages the leaves next in line, so that tiers can write them before eviction.

    Written leaves are evicted first, then those being written, then the rest.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.staged_pages = 0
        self._heap = EvictionHeap(policy, tiered=True)
        self._written: OrderedDict[Node, int] = OrderedDict()  # pages, in the order of eviction
        self._unwritten: OrderedDict[Node, int] = OrderedDict()

    def push(self, node: Node) -> None:
        """Add a node; ignored if it has no pages on the device."""
        self._unstage(node)
        if len(node.pages):
            self._heap.push(node)

    def forget(self, node: Node) -> None:
        self._unstage(node)
        self._heap.forget(node)

    def holds(self, node: Node) -> bool:
        return self._heap.holds(node) or node in self._written or node in self._unwritten

    def pop(self) -> Node | None:
        for staged in (self._written, self._unwritten):
            while staged:
                node, pages = staged.popitem(last=False)
                self.staged_pages -= pages
                if not node.locks and (node.parts is None or not node.parts.on_device):
                    return node
        return self._heap.pop()

    @property
    def num_unstaged(self) -> int:
        """Upper bound of the leaves that are not staged; 0 once all have been visited."""
        return len(self._heap)

    def pop_unstaged(self) -> Node | None:
        """Return the next leaf to stage, or None; push it again if it is not staged."""
        return self._heap.pop()

    def stage(self, node: Node, *, written: bool) -> None:
        """Let `node` be evicted before all leaves that are not staged."""
        staged = self._written if written else self._unwritten
        staged[node] = len(node.pages)
        self.staged_pages += len(node.pages)

    def mark_written(self, node: Node) -> None:
        """Record that a tier now holds all of `node`."""
        pages = self._unwritten.pop(node, None)
        if pages is not None:
            self._written[node] = pages

    def _unstage(self, node: Node) -> None:
        pages = self._written.pop(node, None) or self._unwritten.pop(node, None)
        self.staged_pages -= pages or 0


def _is_leaf(node: Node) -> bool:
    """In a tree with tiers, whether the pages of a node may be evicted before its children."""
    return node.parts is not None and not node.parts.on_device
