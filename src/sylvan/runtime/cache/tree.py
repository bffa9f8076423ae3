"""The nodes of the prefix tree, and page accounting."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.runtime.cache.components import Component
from sylvan.runtime.cache.events import EventLog
from sylvan.runtime.cache.ghosts import Ghosts
from sylvan.runtime.cache.heap import EvictionOrder
from sylvan.runtime.cache.matching import node_name
from sylvan.runtime.cache.types import (
    Locator,
    Node,
    NodeParts,
    Place,
    Writing,
    below,
    digests,
    overlapping,
)


class NodeTree:
    """Attaches, splits, shortens and locks nodes, and maintains the counters.

    Invariants, checked in tests: a parent has at least as many locks as any child; a locked node is
    never evicted; `evictable_pages` is the number of device pages of unlocked nodes; only leaves
    end inside a page; siblings never share a whole page. With lower tiers: the ancestors of a node
    on the device are on the device too; each node is in at least one tier.
    """

    def __init__(
        self,
        page_size: int,
        heap: EvictionOrder,
        components: Sequence[Component] = (),
        *,
        num_windows: int = 0,
        tiered: bool = False,
    ) -> None:
        """`heap` selects the next eviction; `components` start with those of window groups."""
        self.page_size = page_size
        self.evictable_pages = 0
        self.total_pages = 0
        self.num_nodes = 0
        self.roots: dict[str, Node] = {}
        self.versions: dict[str, int] = {}  # version of each namespace with a root; never reused
        self._changes = itertools.count(1)
        self.components = tuple(components)
        self.tiered = tiered
        self.heap = heap
        self.ghosts = Ghosts()
        self.dropped: list[tuple[Place, Locator]] = []  # freed tier memory; `Residency` collects it
        self.writing: dict[int, list[Node]] = {}  # nodes of each running write to a tier, by number
        self._ordered = page_size > 1  # keep children sorted, to find partial-page hits
        self.num_windows = num_windows
        self.events = EventLog()  # for external subscribers (KV events)

    # ---- structure

    def attach(
        self, parent: Node, leaf: Node, lower: Mapping[Place, Locator] | None = None
    ) -> None:
        """Add a leaf; the tree takes ownership of its pages.

        `lower`: lower tiers that hold its KV.
        """
        name = node_name(leaf, self.page_size)
        assert name not in parent.children
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        self.versions[parent.namespace] = next(self._changes)
        parent.adopt(name, leaf, ordered=self._ordered)
        if self.num_windows or self.tiered:
            count = -(-len(leaf.tokens) // self.page_size)
            leaf.parts = NodeParts([np.zeros(count, np.int32) for _ in range(self.num_windows)])
            leaf.parts.lower.update(lower or ())
        if self.tiered and len(leaf.pages):
            self._count_child(parent, 1)
        if not leaf.locks:
            self.evictable_pages += len(leaf.pages)
            self.heap.push(leaf)
        self.total_pages += len(leaf.pages)
        self.num_nodes += 1
        if len(leaf.pages):
            self.events.add("insert", leaf, len(leaf.tokens))

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` in two at token `at`; return the upper half, which keeps its locks."""
        parent, pages = node.parent, at // self.page_size
        assert parent is not None
        name = node_name(node, self.page_size)
        upper = Node(
            node.tokens[:at],
            node.pages[:pages],
            parent,
            start=node.start,
            media=overlapping(node.media, node.start, node.start + at),
            namespace=node.namespace,
            locks=node.locks,
            last_used=node.last_used,
            created=node.created,
            hits=node.hits,
            priority=node.priority,
            computed_at=node.computed_at,
        )
        parent.children[name] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[pages:], upper
        node.start += at
        node.media = overlapping(node.media, node.start, node.stop)
        upper.adopt(node_name(node, self.page_size), node, ordered=self._ordered)
        self.num_nodes += 1
        if node.parts is not None:
            self._split_parts(upper, node, node.parts, pages)
        return upper

    def node_at(self, node: Node, stop: int) -> Node:
        """The node at or above `node` that ends at position `stop`, split there if necessary."""
        while node.start >= stop and node.parent is not None:
            node = node.parent
        return node if node.stop == stop else self.split(node, stop - node.start)

    def truncate(self, leaf: Node, count: int) -> IntArray:
        """Free the last `count` device pages of an unlocked leaf; remove it if none are left."""
        if self.tiered:
            return self._give_up(leaf, count)
        keep = len(leaf.pages) - count
        if not keep:
            return self.remove(leaf)
        cut = keep * self.page_size
        self.evictable_pages -= count
        self.total_pages -= count
        tokens, pages = leaf.tokens, leaf.pages
        self._forget(leaf, cut, int(tokens[cut - 1]))
        if self.components:
            self._leave(leaf, keep)
        leaf.tokens, leaf.pages = tokens[:cut].copy(), pages[:keep].copy()
        self.versions[leaf.namespace] = next(self._changes)
        self.heap.push(leaf)
        return pages[keep:]

    def remove(self, node: Node) -> IntArray:
        """Remove an unlocked node and its subtree; return their device pages."""
        above = node.parent
        assert above is not None
        pages = node.pages
        self.evictable_pages -= len(pages)
        self.total_pages -= len(pages)
        name = self._forget(node, 0, int(above.tokens[-1]) if len(above.tokens) else -1)
        if self.components:
            self._leave(node, 0)
        if self.tiered:
            self._drop_below(node)
            self._count_child(above, -1 if len(pages) else 0)
        above.disown(name)
        self.num_nodes -= 1
        node.parent = None
        if node.queued or self.tiered:
            self.heap.forget(node)
        if above.parent is not None:
            self.heap.push(above)
        elif not above.children:
            del self.roots[above.namespace], self.versions[above.namespace]
            return pages
        self.versions[above.namespace] = next(self._changes)
        return pages

    # ---- locks

    def lock(self, node: Node) -> None:
        """Protect the prefix ending at `node` from eviction."""
        while (parent := node.parent) is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = parent

    def lock_down(self, held: Node | None, node: Node) -> None:
        """Extend a lock on `held` down to its descendant `node`."""
        while held is not None and node is not held and node.parent is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while (parent := node.parent) is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable_pages += len(node.pages)
                self.heap.push(node)
            node = parent

    def repair_locks(self, locks: Mapping[Node, int]) -> int:
        """Set locks, counters and the heap to match `locks`; return how many locks were wrong."""
        wrong = self.evictable_pages = self.total_pages = 0
        for node in below(self.roots.values()):
            want = locks.get(node, 0)
            is_leaf = not (want or node.children) and len(node.pages) > 0
            wrong += node.locks != want or (is_leaf and not self.heap.holds(node))
            node.locks = want
            self.total_pages += len(node.pages)
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self.heap.push(node)
        return wrong

    # ---- lower tiers

    def fill(self, node: Node, pages: IntArray, step: int | None = None) -> None:
        """Give device pages to a node without any; computed by `step`, or loaded if None."""
        node.pages = pages.copy()
        if step is not None:
            node.computed_at = step
        self.total_pages += len(pages)
        assert node.parent is not None
        self._count_child(node.parent, 1)
        if not node.locks:
            self.evictable_pages += len(pages)
            self.heap.push(node)
        self.events.add("insert", node, len(node.tokens))

    def demote(self, node: Node) -> IntArray:
        """Free the device pages of an unlocked node that a lower tier holds too."""
        pages, above = node.pages, node.parent
        assert above is not None
        self.evictable_pages -= len(pages)
        self.total_pages -= len(pages)
        self.events.add("evict", node, len(node.tokens))
        self._leave(node, 0)
        self._void_writes(node, Place.DEVICE)
        node.pages = EMPTY_IDS
        self.heap.forget(node)
        self._count_child(above, -1)
        if above.parent is not None:
            self.heap.push(above)
        return pages

    def forget_lower(self, node: Node, place: Place) -> None:
        """Record that a node is no longer in a tier; remove it if that was the last one."""
        parts = node.parts
        assert parts is not None
        assert not parts.readers, "a load is reading from it"
        self.events.add("evict", node, len(node.tokens), place)
        self.dropped.append((place, parts.lower.pop(place)))
        self._void_writes(node, place)
        if not node.places:
            self.remove(node)

    def forget_all_lower(self, only: Place | None = None) -> None:
        """Drop all KV in lower tiers except what running loads read.

        `only`: a single tier.
        """
        nodes = sorted(below(self.roots.values()), key=attrgetter("start"), reverse=True)
        for node in nodes:
            places = node.parts.lower if node.parts is not None and not node.parts.readers else ()
            for place in tuple(places):
                if node.parent is not None and only in (None, place):
                    self.forget_lower(node, place)

    # ---- inside

    def _give_up(self, leaf: Node, count: int) -> IntArray:
        """Free the last `count` device pages of a leaf; copies in lower tiers stay."""
        keep = len(leaf.pages) - count
        if keep:
            self.split(leaf, keep * self.page_size)
        return self.demote(leaf) if leaf.parts and leaf.parts.lower else self.remove(leaf)

    def _leave(self, node: Node, keep: int) -> None:
        """Keep only the first `keep` device pages of a node."""
        for component in self.components:
            component.on_leave(node, keep)
        if keep and node.parts is not None:
            node.parts.windows = [pages[:keep].copy() for pages in node.parts.windows]

    def _void_writes(self, node: Node, source: Place) -> None:
        """Void running writes that read from a tier whose memory is being reused."""
        for write in node.parts.writes_from(source) if node.parts else ():
            write.is_void = True

    def _drop_below(self, node: Node) -> None:
        """Forget all tier copies of a removed node and of its descendants."""
        if self.events.on:
            for gone in (*below((node,)), node):
                for place in gone.parts.lower if gone.parts is not None else ():
                    self.events.add("evict", gone, len(gone.tokens), place)
        for gone in (*below((node,)), node):
            assert gone.parts is not None
            self.dropped.extend(gone.parts.lower.items())
            gone.parts.lower.clear()
            if gone is not node:
                gone.parent = None
                self.num_nodes -= 1

    def _split_parts(self, upper: Node, node: Node, parts: NodeParts, pages: int) -> None:
        if not (self.num_windows or self.tiered):  # recurrent states only
            return
        upper.parts = own = NodeParts(readers=parts.readers)
        own.on_device = int(len(node.pages) > 0)
        for place, locator in parts.lower.items():
            own.lower[place] = locator.split_off(pages)
        for number, write in parts.writing.items():
            locator = write.locator.split_off(pages)
            own.writing[number] = Writing(locator, write.source, write.target, write.is_void)
            self.writing[number].append(upper)
        for component in self.components:
            component.on_split(upper, node, pages)

    def _count_child(self, parent: Node, change: int) -> None:
        """Update `parent` after a child gained or lost its device pages."""
        if parent.parts is not None:
            parent.parts.on_device += change

    def _forget(self, node: Node, cut: int, before: int) -> bytes:
        """Record that the tokens of a node from `cut` on are lost; return their first child key."""
        gone, start = node.tokens[cut:], node.start + cut
        if len(node.pages):
            self.events.add("evict", node, len(gone))
        name = gone[: self.page_size].tobytes()
        if node.media:
            name += digests(node.media, start, start + self.page_size)
        self.ghosts.note(node.namespace, start, before, name)
        return name
