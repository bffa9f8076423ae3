"""Decides when nodes of the prefix tree are copied to lower tiers: host memory, or a store.

Eviction frees device pages at once, in the same order as without tiers. So that their KV is not
lost, the leaves that are next in eviction order are written to a tier ahead of time
(`Residency.poll`). A slow or full tier costs cache hits, but never delays a request. Loading KV
back is in `loads`; the tiers move the bytes (`features.tiers`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.heap import StagedHeap
from sylvan.runtime.cache.matching import path_to, walk
from sylvan.runtime.cache.tree import NodeTree
from sylvan.runtime.cache.types import (
    ABSENT,
    CacheKey,
    Locator,
    Node,
    NodeParts,
    Place,
    Writing,
    overlapping,
)

MAX_DEMOTIONS = 65_536
"""Maximum number of nodes queued for a copy to the next lower tier; the oldest are dropped."""
_SLACK = 1024  # dead entries tolerated before a rebuild


class Tier(Protocol):
    """One tier below the device, as the prefix tree sees it; its worker half moves the bytes.

    Attributes:
        place: Which tier it is.
        whole_prefixes: Whether a node is useful only if its whole prefix is in this tier too.
    """

    place: Place
    whole_prefixes: bool

    @property
    def is_open(self) -> bool:
        """Whether the tier accepts writes now."""
        ...

    @property
    def free_pages(self) -> int:
        """Number of pages that the tier can accept now."""
        ...

    def wants(self, node: Node) -> bool:
        """Whether the tier would ever accept this node, regardless of free space."""
        ...

    def offer(self, number: int, node: Node, source: Place) -> Locator | None:
        """Start writing the KV of a node as write `number`; None if it cannot now.

        If `source` is the device, the tier reads `Node.pages`, `NodeParts.windows` and
        `NodeParts.state`; otherwise `NodeParts.lower[source]`. It reads after all steps that were
        launched before. `poll` reports completion even if the source was reused meanwhile; the tree
        then drops the copy.

        Returns:
            Where the tier will store the node. It must store all whole pages of the first group.
        """
        ...

    def poll(self) -> Iterable[tuple[int, bool]]:
        """Writes that ended since the last call, and whether they succeeded."""
        ...

    def drop(self, locator: Locator) -> None:
        """Free a locator. Each page and state is dropped exactly once."""
        ...


class StoredPrefix(Protocol):
    """Part of a prompt that a tier was found to have, although this tree did not write it.

    Its methods return numbers for use in a `Locator`; each is called at most once per page.

    Attributes:
        first: First page of the prompt that the tier has.
        stop: Page after the last one.
    """

    first: int
    stop: int

    def page(self, page: int) -> int:
        """Number of a page of the first group."""
        ...

    def window(self, group: int, page: int) -> int:
        """Number of a page of a window group; `ABSENT` if unavailable."""
        ...

    def state(self, stop: int) -> int:
        """Number of the recurrent state after `stop` pages; `ABSENT` if unavailable."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPolicy:
    """When KV is written to lower tiers, and when it is loaded.

    Attributes:
        write_ahead_pages: Number of device pages, in eviction order, that should have a copy in a
          lower tier. If it covers the whole device, all KV is written once no request uses it.
        min_load_tokens: Shorter prefixes are recomputed instead of loaded; at least 1.
    """

    write_ahead_pages: int
    min_load_tokens: int = 16


class Residency:
    """Writes nodes to the tiers, the nearest first, and drops them there when a tier is full."""

    def __init__(
        self,
        nodes: NodeTree,
        heap: StagedHeap,
        eviction: EvictionPolicy,
        tiers: Sequence[Tier],
        write_ahead_pages: int,
    ) -> None:
        self._nodes, self._heap = nodes, heap
        self.write_ahead_pages = write_ahead_pages  # see `TierPolicy`; may be changed
        self._tiers = {tier.place: tier for tier in tiers}
        self._next = dict(itertools.pairwise(self._tiers))  # the place below each
        self._nearest = next(iter(self._tiers), None)
        self._demoting: dict[Place, deque[Node]] = {
            place: deque(maxlen=MAX_DEMOTIONS) for place in self._next.values()
        }
        self._heaps = {place: _TierHeap(eviction, place) for place in self._tiers}
        self._writes: dict[int, Tier] = {}
        self._numbers = itertools.count(1)
        self._refused = False  # whether a write was refused since the last `poll` began
        self._invalidated: set[int] = set()  # running writes of nodes that `clear` removed

    @property
    def places(self) -> Iterable[Place]:
        """The tiers, nearest first."""
        return self._tiers.keys()

    @property
    def has_unwritten(self) -> bool:
        """Whether `poll` could start a write without any other event.

        A write that was refused while no other was running stays refused until the tree changes,
        because no tier has room.
        """
        if self._refused and not self._writes:
            return False
        heap = self._heap
        if heap.num_unstaged > 0 and heap.staged_pages < self.write_ahead_pages:
            return True
        return any(self._demoting.values())

    def poll(self, completed: int) -> None:
        """Process finished writes, and start new ones.

        Args:
            completed: Last step whose results have arrived; KV of later steps is not written.
        """
        for tier in self._tiers.values():
            for number, succeeded in tier.poll():
                self._end_write(number, succeeded=succeeded)
        self._refused = False
        self._demote(completed)
        self._write_ahead(completed)
        self.collect()

    def back_up(self, node: Node, completed: int) -> bool:
        """Start writing a node and its ancestors that no tier has; False if a tier refuses one.

        Args:
            node: A node on the device.
            completed: See `poll`.
        """
        path = [*path_to(node)][::-1]
        for each in path:
            parts_of(each).readers += 1  # do not evict this prefix to make room for itself
        try:
            return all(self._back_up_node(each, completed) for each in path)
        finally:
            for each in path:
                parts_of(each).readers -= 1

    def was_evicted(self, number: int) -> bool:
        """Whether device pages of a write were reused, except by clearing the cache."""
        if number in self._invalidated:
            return False
        for node in self._nodes.writing.get(number, ()):
            write = parts_of(node).writing[number]
            if node.parent is None or write.is_void or write.lost:
                return True
        return False

    def on_clear(self) -> None:
        """Call this before the tree forgets all nodes because their KV became invalid."""
        self._invalidated.update(self._writes)

    def cached_in(self, places: Place, key: CacheKey, limit: int) -> int:
        """Number of leading tokens of `key`, at most `limit` and in whole pages, in `places`."""
        found, nodes = 0, self._nodes
        root = nodes.roots.get(key.namespace)
        for node, count in walk(root, key, limit, nodes.page_size).path:
            if not node.places & places:
                break
            found += count * nodes.page_size
        return found

    def add_stored(self, key: CacheKey, place: Place, stored: StoredPrefix) -> bool:
        """Add pages that a tier was found to have to the tree, so that requests can load them.

        Returns False, changing nothing, if the prefix before them is no longer cached.
        """
        size, tier = self._nodes.page_size, self._tiers[place]
        node, reached = self._reach(key, stored.stop * size)
        if reached < stored.first * size:
            return False
        lacking = stored.stop - stored.first - tier.free_pages
        if lacking > 0:
            self._shrink_tier(place, lacking)
            node, reached = self._reach(key, stored.stop * size)
            if reached < stored.first * size or tier.free_pages < stored.stop - stored.first:
                return False
        for known in [*path_to(node)][::-1]:
            if known.start >= stored.first * size:
                self._add_stored_to_node(known, place, stored)
        if reached < stored.stop * size:
            tokens = key.tokens[reached : stored.stop * size].copy()
            media = overlapping(key.media, reached, stored.stop * size)
            leaf = Node(tokens, EMPTY_IDS, node, reached, key.namespace, media=media)
            leaf.last_used = leaf.created = node.last_used
            locator = self._locate(reached // size, stored.stop, stored)
            self._nodes.attach(node, leaf, {place: locator})
            self._nodes.events.add("insert", leaf, len(leaf.tokens), place)
            self._heaps[place].push(leaf)
        return True

    def forget(self, place: Place) -> None:
        """Forget the contents of a tier that was cleared or removed, except running loads."""
        if (waiting := self._demoting.get(place)) is not None:
            waiting.clear()
        self._nodes.forget_all_lower(place)
        self.collect()

    def collect(self) -> None:
        """Free tier memory that the tree no longer uses."""
        dropped = self._nodes.dropped
        while dropped:
            place, locator = dropped.pop()
            self._tiers[place].drop(locator)

    # ---- inside

    def _reach(self, key: CacheKey, length: int) -> tuple[Node, int]:
        """The deepest node within the first `length` tokens, split there, and its end."""
        nodes = self._nodes
        root = nodes.roots.get(key.namespace) or Node(
            EMPTY_IDS, EMPTY_IDS, None, namespace=key.namespace
        )
        found = walk(root, key, length, nodes.page_size)
        end = nodes.node_at(found.path[-1].node, found.length) if found.path else root
        return end, found.length

    def _write_ahead(self, completed: int) -> None:
        heap, later = self._heap, list[Node]()
        while heap.staged_pages < self.write_ahead_pages and (node := heap.pop_unstaged()):
            parts = parts_of(node)
            if parts.writing or self._nearest in parts.lower:
                heap.stage(node, written=bool(parts.lower))
            elif node.computed_at > completed:
                later.append(node)
            elif self._stage(node, completed):
                heap.stage(node, written=not parts.writing)
            else:
                later.append(node)
                break
        for node in later:
            heap.push(node)

    def _back_up_node(self, node: Node, completed: int) -> bool:
        parts = parts_of(node)
        if self._nearest in parts.lower or parts.writing or not self._is_wanted(node):
            return True
        return node.computed_at <= completed and self._write_anywhere(node)

    def _is_wanted(self, node: Node) -> bool:
        """Whether any tier would accept a node; tiers cannot use nodes shorter than a page."""
        whole = len(node.tokens) >= self._nodes.page_size
        return whole and any(tier.wants(node) for tier in self._tiers.values())

    def _write_anywhere(self, node: Node) -> bool:
        """Offer a node to the tiers, nearest first, until one accepts or already has it."""
        for tier in self._tiers.values():
            if tier.place in parts_of(node).lower:
                return True
            if tier.wants(node) and self._write(node, Place.DEVICE, tier):
                return True
        return False

    def _demote(self, completed: int) -> None:
        """Copy nodes from each tier to the next lower one, as long as writes are accepted."""
        for place, waiting in self._demoting.items():
            tier = self._tiers[place]
            while waiting and self._demote_node(waiting[0], tier, completed):
                waiting.popleft()

    def _demote_node(self, node: Node, tier: Tier, completed: int) -> bool:
        """Start writing a node to a lower tier too; False if the tier refuses it now."""
        path = [*path_to(node)][::-1] if tier.whole_prefixes else [node]
        for each in path:
            parts_of(each).readers += 1  # as in `back_up`
        try:
            return all(self._demote_one(each, tier, completed) for each in path)
        finally:
            for each in path:
                parts_of(each).readers -= 1

    def _demote_one(self, node: Node, tier: Tier, completed: int) -> bool:
        parts = parts_of(node)
        targets = (write.target for write in parts.writing.values())
        if node.parent is None or tier.place in parts.lower or tier.place in targets:
            return True
        if len(node.tokens) < self._nodes.page_size or not tier.wants(node):
            return True
        if len(node.pages) and node.computed_at <= completed:
            return self._write(node, Place.DEVICE, tier)
        source = next((place for place in self._tiers if place in parts.lower), None)
        return source is None or self._write(node, source, tier)

    def _stage(self, node: Node, completed: int) -> bool:
        """Write a node and its prefix to a tier, because it is evicted soon."""
        if any(tier.whole_prefixes for tier in self._tiers.values()):
            return self.back_up(node, completed)
        return not self._is_wanted(node) or self._write_anywhere(node)

    def _add_stored_to_node(self, node: Node, place: Place, stored: StoredPrefix) -> None:
        """Record that a tier holds a node, or more of its KV groups than known."""
        parts, size = parts_of(node), self._nodes.page_size
        first, stop = node.start // size, node.stop // size
        known = parts.lower.get(place)
        if known is None:
            if node.stop == stop * size and not parts.writing:
                parts.lower[place] = self._locate(first, stop, stored)
                self._nodes.events.add("insert", node, len(node.tokens), place)
                self._heaps[place].push(node)
                self._heap.mark_written(node)
            return
        for group, pages in enumerate(known.windows):
            for at in np.flatnonzero(pages == ABSENT).tolist():
                pages[at] = stored.window(group, first + at)
        if known.state == ABSENT:
            known.state = stored.state(stop)

    def _locate(self, first: int, stop: int, stored: StoredPrefix) -> Locator:
        each = range(first, stop)
        groups = range(self._nodes.num_windows)
        return Locator(
            np.array([stored.page(page) for page in each], np.int64),
            tuple(np.array([stored.window(g, page) for page in each], np.int64) for g in groups),
            stored.state(stop),
        )

    def _write(self, node: Node, source: Place, tier: Tier) -> bool:
        """Offer a node to a tier, after making room there."""
        lacking = -(-len(node.tokens) // self._nodes.page_size) - tier.free_pages
        if lacking > 0:
            self._shrink_tier(tier.place, lacking)
        number = next(self._numbers)
        locator = tier.offer(number, node, source)
        if locator is None:
            self._refused = True
            return False
        parts_of(node).writing[number] = Writing(locator, source, tier.place)
        self._nodes.writing[number] = [node]
        self._writes[number] = tier
        return True

    def _end_write(self, number: int, *, succeeded: bool) -> None:
        tier = self._writes.pop(number)
        self._invalidated.discard(number)
        for node in self._nodes.writing.pop(number):
            parts = parts_of(node)
            write = parts.writing.pop(number)
            for lost in write.lost:
                tier.drop(lost)
            gone = node.parent is None or tier.place in parts.lower
            if gone or write.is_void or not succeeded:
                tier.drop(write.locator)
                continue
            parts.lower[tier.place] = write.locator
            self._nodes.events.add("insert", node, len(node.tokens), tier.place)
            self._heaps[tier.place].push(node)
            self._heap.mark_written(node)
            below = self._next.get(tier.place)
            if below is not None and below not in parts.lower and self._tiers[below].is_open:
                self._demoting[below].append(node)

    def _shrink_tier(self, place: Place, num_pages: int) -> None:
        """Drop nodes of a tier, in eviction order, until `num_pages` pages are free."""
        heap, passed = self._heaps[place], list[Node]()
        while num_pages > 0 and (node := heap.pop()):
            if not _is_droppable(node, place):
                passed.append(node)
                continue
            num_pages -= len(parts_of(node).lower[place].pages)
            above = node.parent
            self._nodes.forget_lower(node, place)
            if above is not None:
                heap.push(above)
        for node in passed:
            heap.push(node)
        self.collect()


class _TierHeap:
    """The nodes of one tier in eviction order.

    For each node in the tier, the heap contains the node or one of its descendants.
    """

    def __init__(self, policy: EvictionPolicy, place: Place) -> None:
        self._policy, self._place = policy, place
        self._heap: list[tuple[Any, ...]] = []  # (*rank, number, node)
        self._numbers = itertools.count(1)
        self._live: dict[Node, int] = {}  # number of the live entry
        self._rebuild_at = _SLACK

    def push(self, node: Node) -> None:
        """Add a node if the tier holds it."""
        if node.parts is None or self._place not in node.parts.lower:
            return
        number = self._live[node] = next(self._numbers)
        heapq.heappush(self._heap, (*self._policy(node), number, node))
        if len(self._heap) > self._rebuild_at:
            self._heap = [e for e in self._heap if self._is_live(e[-1], e[-2])]
            heapq.heapify(self._heap)
            self._live = {entry[-1]: entry[-2] for entry in self._heap}
            self._rebuild_at = 2 * len(self._heap) + _SLACK

    def pop(self) -> Node | None:
        """Remove and return the node to drop first."""
        while self._heap:
            *rank, number, node = heapq.heappop(self._heap)
            if not self._is_live(node, number):
                continue
            del self._live[node]
            if self._policy(node) <= tuple(rank):
                return node
            self.push(node)
        return None

    def _is_live(self, node: Node, number: int) -> bool:
        """Whether this is the newest entry of a node that the tier still holds."""
        if self._live.get(node) != number:
            return False
        return node.parent is not None and self._place in parts_of(node).lower


def parts_of(node: Node) -> NodeParts:
    """The parts of a node; in a tree with tiers, every node has them."""
    assert node.parts is not None
    return node.parts


def _is_droppable(node: Node, place: Place) -> bool:
    """Whether a tier may drop a node: no node elsewhere depends on it."""
    return not parts_of(node).readers and (node.places != place or not node.children)
