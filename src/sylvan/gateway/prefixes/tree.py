"""An approximate radix tree: which prompts were sent to which worker, within a memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from sylvan.gateway.prefixes.nodes import below

PAGE = 16
"""Edges are split at multiples of this many bytes; prefixes count in whole pages."""
NODE_BYTES = 450
"""Approximate memory of a node without its edge and tags, in bytes."""
TAG_BYTES = 230
"""Approximate memory of one tag with its heap entry, in bytes."""
SLACK = 0.05
"""Share of the limit that is freed at once when the limit is reached."""


class _Node:
    """A run of bytes below its parent.

    `tags` holds, for each worker that was sent these bytes, the tick of the last time. The workers
    of a node are a subset of its parent's, and were sent the parent's bytes no earlier.
    """

    __slots__ = ("children", "depth", "edge", "parent", "tags")

    def __init__(self, edge: bytes, parent: _Node | None, depth: int) -> None:
        self.edge = edge
        self.parent = parent
        self.depth = depth  # bytes from the root to the end of the edge
        self.children: dict[bytes, _Node] = {}
        self.tags: dict[str, int] = {}


_Entry = tuple[int, int, int, _Node]
"""Tick, negative depth, unique number, node: the smallest is evicted first."""


@dataclass(slots=True)
class _Held:
    """A worker's nodes: their bytes, and a heap entry per node that may be outdated.

    The tick of an entry is never later than that of the tag, so a node pops before its parent.
    """

    num_bytes: int = 0
    limit: int | None = None
    heap: list[_Entry] = field(default_factory=list[_Entry])


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The path of a key in the tree; valid until the tree changes.

    Attributes:
        key: The key's whole pages.
        path: Nodes whose edges lie wholly on the key.
        length: Bytes of the key up to the end of the last node.
        partial: Node whose edge matches only in part.
        partial_bytes: Matching bytes of that edge.
    """

    key: bytes
    path: tuple[_Node, ...]
    length: int
    partial: _Node | None = None
    partial_bytes: int = 0


class PrefixTree:
    """A radix tree over bytes, with the workers that hold each node.

    Evicts least recently used entries: of one worker when it exceeds its own limit, of the worker
    that holds most when the whole tree exceeds its limit.

    Args:
        max_bytes: Limit of the tree's estimated memory.

    Attributes:
        num_bytes: Estimated memory.
        num_nodes: Number of nodes, without the root.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._root = _Node(b"", None, 0)
        self._held: dict[str, _Held] = {}
        self._ticks = itertools.count(1)
        self._numbers = itertools.count()
        self.num_bytes = 0
        self.num_nodes = 0

    def held_bytes(self, worker: str) -> int:
        """Return the bytes of prompts that a worker holds."""
        held = self._held.get(worker)
        return held.num_bytes if held else 0

    def set_limit(self, worker: str, num_bytes: int | None) -> None:
        """Limit what a worker can hold; None: no limit."""
        held = self._held.get(worker)
        if held is not None:
            held.limit = num_bytes
            self._trim(worker)

    def find(self, key: bytes) -> PrefixMatch:
        """Follow a key as far as it matches."""
        key = key[: len(key) - len(key) % PAGE]
        node, position = self._root, 0
        path: list[_Node] = []
        while True:
            child = node.children.get(key[position : position + PAGE])
            if child is None:
                return PrefixMatch(key, tuple(path), position)
            if not key.startswith(child.edge, position):
                return PrefixMatch(
                    key, tuple(path), position, child, _common(child.edge, key, position)
                )
            path.append(child)
            position += len(child.edge)
            node = child

    def matched(self, found: PrefixMatch, beyond: int = 0) -> Mapping[str, int]:
        """Return the bytes of the key that each worker holds; omit workers with at most `beyond`.

        With a bound, the prefix common to all keys need not list every worker.
        """
        lengths: dict[str, int] = {}
        if found.partial is not None and found.length + found.partial_bytes > beyond:
            lengths = dict.fromkeys(found.partial.tags, found.length + found.partial_bytes)
        for node in reversed(found.path):
            depth = node.depth
            if depth <= beyond:
                break
            if len(lengths) < len(node.tags):
                for worker in node.tags:
                    if worker not in lengths:
                        lengths[worker] = depth
        return lengths

    def insert(self, found: PrefixMatch, worker: str) -> None:
        """Record that a worker was sent the key of `found`, which must be up to date."""
        path = list(found.path)
        if found.partial is not None:
            path.append(self._split(found.partial, found.partial_bytes))
        covered = path[-1].depth if path else 0
        if covered < len(found.key):
            path.append(self._leaf(path[-1] if path else self._root, found.key[covered:]))
        tick = next(self._ticks)
        held = self._held.setdefault(worker, _Held())
        for node in path:
            if worker not in node.tags:
                held.num_bytes += len(node.edge)
                self.num_bytes += TAG_BYTES
                heappush(held.heap, (tick, -node.depth, next(self._numbers), node))
            node.tags[worker] = tick
        self._trim(worker)

    def drop(self, worker: str) -> None:
        """Remove everything that a worker holds."""
        held = self._held.pop(worker, None)
        for *_, node in sorted(held.heap, key=lambda entry: entry[1]) if held else ():
            self._untag(node, worker)

    def _split(self, node: _Node, num_bytes: int) -> _Node:
        """Split the edge of a node; return the upper node."""
        parent = node.parent
        assert parent is not None, "the root has no edge"
        upper = _Node(node.edge[:num_bytes], parent, node.depth - len(node.edge) + num_bytes)
        upper.tags = dict(node.tags)
        parent.children[upper.edge[:PAGE]] = upper
        node.edge, node.parent = node.edge[num_bytes:], upper
        upper.children[node.edge[:PAGE]] = node
        for worker, tick in upper.tags.items():
            entry = (tick, -upper.depth, next(self._numbers), upper)
            heappush(self._held[worker].heap, entry)
        self.num_nodes += 1
        self.num_bytes += NODE_BYTES + len(upper.tags) * TAG_BYTES
        return upper

    def _leaf(self, parent: _Node, edge: bytes) -> _Node:
        node = _Node(edge, parent, parent.depth + len(edge))
        parent.children[edge[:PAGE]] = node
        self.num_nodes += 1
        self.num_bytes += NODE_BYTES + len(edge)
        return node

    def _trim(self, worker: str) -> None:
        held = self._held[worker]
        if held.limit is not None and held.num_bytes > held.limit:
            self._evict(worker, held.limit)
        if self.num_bytes > self._max_bytes:
            goal = int(self._max_bytes * (1 - SLACK))
            while self.num_bytes > goal:
                largest = max(self._held, key=lambda name: self._held[name].num_bytes)
                self._evict(largest, int(self._held[largest].num_bytes * (1 - SLACK)) - 1)

    def _evict(self, worker: str, goal: int) -> None:
        held = self._held[worker]
        while held.num_bytes > goal and held.heap:
            tick, negative_depth, number, node = heappop(held.heap)
            used = node.tags[worker]
            if used != tick:
                heappush(held.heap, (used, negative_depth, number, node))
                continue
            held.num_bytes -= len(node.edge)
            self._untag(node, worker)

    def _untag(self, node: _Node, worker: str) -> None:
        """Remove a worker's tag from a node whose children do not have it."""
        del node.tags[worker]
        self.num_bytes -= TAG_BYTES
        if node.tags:
            return
        assert node.parent is not None, "the root has no tags"
        assert not node.children, "a worker that holds a child holds its parent"
        del node.parent.children[node.edge[:PAGE]]
        self.num_nodes -= 1
        self.num_bytes -= NODE_BYTES + len(node.edge)

    def check(self) -> None:
        """Assert the invariants of this module; for tests."""
        nodes = below(self._root)
        assert len(nodes) == self.num_nodes
        expected = sum(NODE_BYTES + len(n.edge) + TAG_BYTES * len(n.tags) for n in nodes)
        assert self.num_bytes == expected
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert node.edge
            assert len(node.edge) % PAGE == 0
            assert parent.children[node.edge[:PAGE]] is node
            assert node.depth == parent.depth + len(node.edge)
            assert node.tags
            for worker, tick in node.tags.items():
                assert parent is self._root or parent.tags[worker] >= tick
        for worker, held in self._held.items():
            mine = [node for node in nodes if worker in node.tags]
            assert held.num_bytes == sum(len(node.edge) for node in mine)
            assert sorted(map(id, mine)) == sorted(id(entry[3]) for entry in held.heap)
            assert all(entry[0] <= entry[3].tags[worker] for entry in held.heap)


def _common(edge: bytes, key: bytes, position: int) -> int:
    """Return how many bytes, in whole pages, an edge shares with a key from a position on."""
    low, high = 1, min(len(edge), len(key) - position) // PAGE
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(edge[: middle * PAGE], position):
            low = middle
        else:
            high = middle - 1
    return low * PAGE
