"""Longest-prefix cache over token ids: maps the start of a prompt to KV pages."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.runtime.cache.events import TreeEvent
from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.extent import Extents
from sylvan.runtime.cache.heap import EvictionHeap, StagedHeap
from sylvan.runtime.cache.matching import (
    nearest_tail,
    node_name,
    page_name,
    path_to,
    shared_tokens,
    walk,
)
from sylvan.runtime.cache.prefix import ANY, Insertion, Match
from sylvan.runtime.cache.states import NodeStates
from sylvan.runtime.cache.tree import NodeTree
from sylvan.runtime.cache.types import (
    CacheKey,
    MatchCursor,
    Node,
    below,
    common_prefix_len,
    overlapping,
)
from sylvan.runtime.cache.windows import WindowPages


class RadixCache:
    """Radix tree of cached prefixes (RadixAttention, arXiv:2312.07104 s3), one root per namespace.

    Owns every page passed to `insert` until `evict` or `Insertion.freed` returns it. Further KV
    groups are components of a node (see `Component`): a match is the longest prefix from which all
    groups can continue.
    """

    def __init__(
        self,
        page_size: int,
        eviction: EvictionPolicy,
        *,
        windows: Sequence[WindowPages] = (),
        states: NodeStates | None = None,
        min_load_tokens: int = 0,
    ) -> None:
        """`min_load_tokens`: shorter loads from lower tiers are not worthwhile; 0 without tiers."""
        self.page_size = page_size
        self.states = states
        components = (*windows, states) if states is not None else tuple(windows)
        tiered = min_load_tokens > 0
        self.heap = StagedHeap(eviction) if tiered else EvictionHeap(eviction)
        self.nodes = nodes = NodeTree(
            page_size, self.heap, components, num_windows=len(windows), tiered=tiered
        )
        self._tiered = tiered
        self._extents = Extents(nodes, states, min_load_tokens) if components or tiered else None
        self._clock = itertools.count(1)
        self._roots, self._versions = nodes.roots, nodes.versions
        self.ghosts = nodes.ghosts
        self.lock, self.unlock, self.repair_locks = nodes.lock, nodes.unlock, nodes.repair_locks

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could return."""
        return self.nodes.evictable_pages

    @property
    def total_pages(self) -> int:
        """Device pages that the tree owns."""
        return self.nodes.total_pages

    @property
    def num_nodes(self) -> int:
        """Nodes except roots."""
        return self.nodes.num_nodes

    # ---- reading

    def peek(self, key: CacheKey, limit: int, load: int = ANY) -> int:
        """Count the tokens that `match` would find now, at most `limit`, without side effects.

        `load`: as for `match`; 0 counts only KV on the device. A repeated call with the same key
        returns at once while its namespace is unchanged; otherwise it resumes from the node it
        reached.
        """
        if self._extents is not None:
            return self._extents.peek(key, limit, load)
        cursor, size = key.cursor, self.page_size
        version = self._versions.get(key.namespace)
        if version is None:
            return 0
        if cursor is not None and cursor.version == version and cursor.limit == limit:
            return cursor.found
        if cursor is None or not cursor.is_valid(limit):
            root = self._roots[key.namespace]
            cursor = MatchCursor(root, 0, page_name(key, 0, limit, size), limit)
        node, pos, name = cursor.node, cursor.stop, cursor.next_page
        tokens = key.tokens[:limit] if size > 1 or name in node.children else EMPTY_IDS
        while child := node.children.get(name):
            shared = shared_tokens(child, key, tokens, pos, size)
            if shared < len(child.tokens):
                break
            node, pos = child, pos + shared
            name = page_name(key, pos, limit, size)
        else:
            shared = nearest_tail(node, tokens, key, pos, size)[1]
        if node is not cursor.node:
            cursor = MatchCursor(node, pos, name, limit)
        key.cursor, cursor.version, cursor.found = cursor, version, pos + shared
        return pos + shared

    def first_page(self, key: CacheKey) -> bytes:
        """Child key of the prompt's first page; empty if the prompt is shorter."""
        return page_name(key, 0, len(key.tokens), self.page_size)

    def match(
        self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0, load: int = 0
    ) -> Match:
        """Find the longest cached prefix of `key`, at most `limit` tokens, and mark it used.

        A tail inside a page is returned only if a step before `step` computed it. Prefixes of at
        most `load` tokens in lower tiers also count, if they are sufficiently longer.
        """
        tokens = key.tokens[:limit]
        node, length = self._descend(key, tokens, priority)
        if self._extents is not None:
            walked = self._extents.walk_to(node, tokens, key, length)
            return self._extents.match(walked, step=step, load=load)
        if not node.order:
            return Match(node, length)
        leaf, count = nearest_tail(node, tokens, key, length, self.page_size)
        if leaf is None or leaf.computed_at >= step:
            return Match(node, length)
        return Match(node, length, leaf, count)

    def find(self, key: CacheKey, *, use: bool = False) -> Node | None:
        """The node that ends with the last token of `key`; None if some KV is not on the device.

        A partial last page with media is not found. With `use`, the whole pages are marked as used
        now.
        """
        stop, node = len(key.tokens), None
        found = walk(self._roots.get(key.namespace), key, stop, self.page_size)
        if found.length == stop:
            node = self.nodes.node_at(found.path[-1].node, stop) if found.path else None
        elif found.end is not None:
            name = b"" if key.media else key.tokens[found.length :].tobytes()
            node = found.end.children.get(name)
        elif found.tail is not None and found.length + found.tail.tokens == stop:
            node = found.tail.node
        if node is None or node.stop != stop or not len(node.pages):
            return None
        if found.tail is not None and found.tail.page:
            self.nodes.split(node, found.tail.page * self.page_size)
        if use:
            whole = node if stop % self.page_size == 0 else node.parent
            for used in reversed([*path_to(whole)] if whole is not None else []):
                used.use(next(self._clock), 0)
        return node

    def pages(self, node: Node) -> IntArray:
        """Device pages of the whole prefix ending at `node`, in token order."""
        parts = [n.pages for n in path_to(node)]
        return np.concatenate(parts[::-1]) if parts else EMPTY_IDS

    def all_pages(self) -> Iterator[IntArray]:
        """The device pages the tree owns, node by node."""
        return (node.pages for node in below(self._roots.values()))

    def roots(self) -> dict[str, Node]:
        """Maps namespaces to roots; always the same mapping. Read only."""
        return self._roots

    # ---- changing

    def insert(
        self,
        key: CacheKey,
        pages: IntArray,
        *,
        with_tail: bool,
        step: int = 0,
        priority: int = 0,
        held: Node | None = None,
    ) -> Insertion:
        """Take ownership of the pages of `key` that are not on the device yet.

        The caller keeps its pages of the first `cached` tokens, and the last partial page unless
        `with_tail`. The caller's lock on `held`, a node on the path, moves to the returned node.
        """
        tokens, size = key.tokens, self.page_size
        if not with_tail and len(tokens) % size:
            tokens = tokens[: len(tokens) // size * size]
        node, cached = self._descend(key, tokens, priority, held)
        rest = tokens[cached:]
        if len(rest) < size and nearest_tail(node, tokens, key, cached, size)[1] == len(rest):
            self.nodes.lock_down(held, node)
            return Insertion(node, cached, self._fill(node, pages, cached, step), EMPTY_IDS)
        freed = self._drop_subsumed(node, rest) if node.order else EMPTY_IDS
        self.nodes.lock_down(held, node)
        first = cached // size
        now = next(self._clock)
        leaf = Node(
            rest.copy(),
            pages[first : first - (-len(rest) // size)].copy(),
            node,
            start=cached,
            media=overlapping(key.media, cached, len(tokens)),
            namespace=key.namespace,
            locks=0 if held is None else 1,
            last_used=now,
            created=now,
            priority=priority,
            computed_at=step,
        )
        if self._tiered:
            cached = self._fill(node, pages, cached, step)
            twin = node.children.get(node_name(leaf, size))
            if twin is not None:  # a partial page that is only in a lower tier
                self.nodes.lock_down(node if held is not None else None, twin)
                self.nodes.fill(twin, leaf.pages, step)
                return Insertion(twin, len(tokens), cached, freed)
        self.nodes.attach(node, leaf)
        return Insertion(leaf, len(tokens), cached, freed)

    def evict(self, num_pages: int) -> IntArray:
        """Evict at least `num_pages` device pages of unlocked nodes, or all of them.

        Leaves are shortened from the end.
        """
        freed: list[IntArray] = []
        need, nodes, heap = num_pages, self.nodes, self.heap
        while need > 0 and (node := heap.pop()):
            taken = nodes.truncate(node, min(need, len(node.pages)))
            need -= len(taken)
            freed.append(taken)
        if len(freed) == 1:
            return freed[0]
        return np.concatenate(freed) if freed else EMPTY_IDS

    def clear(self) -> IntArray:
        """Forget all unlocked nodes; return their device pages."""
        pages = self.evict(self.evictable_pages)
        if self._tiered:
            self.nodes.forget_all_lower()
        return pages

    # ---- subscribers

    def record_events(self) -> None:
        """Start recording events."""
        self.nodes.events.record()

    def take_events(self) -> list[TreeEvent]:
        """Events since the last call."""
        return self.nodes.events.take()

    # ---- inside

    def _descend(
        self, key: CacheKey, tokens: IntArray, priority: int, held: Node | None = None
    ) -> tuple[Node, int]:
        """Walk down whole pages, splitting the last edge where `tokens` leave it.

        The path to a locked node is known, but is marked as used too.
        """
        pos, size, clock = 0, self.page_size, self._clock
        if held is None or held.parent is None:
            root = self._roots.get(key.namespace)
            node = root or Node(EMPTY_IDS, EMPTY_IDS, None, namespace=key.namespace)
        else:
            node, pos = held, held.start + len(held.tokens)
            above = [*path_to(held)] if held.parent.parent is not None else [held]
            for used in reversed(above):
                used.use(next(clock), priority)
        while child := node.children.get(page_name(key, pos, len(tokens), size)):
            shared = shared_tokens(child, key, tokens, pos, size)
            shared -= shared % size
            node = child if shared == len(child.tokens) else self.nodes.split(child, shared)
            node.use(next(clock), priority)
            pos += shared
        return node, pos

    def _fill(self, node: Node, pages: IntArray, cached: int, step: int) -> int:
        """Give nodes on the path to `node` the device pages they lack.

        Returns how many of the `cached` tokens were on the device already.
        """
        if not self._tiered:
            return cached
        for lacking in [n for n in path_to(node) if not len(n.pages)][::-1]:
            cached = min(cached, lacking.start)
            first, stop = lacking.start // self.page_size, lacking.stop // self.page_size
            self.nodes.fill(lacking, pages[first:stop], step)
        return cached

    def _drop_subsumed(self, node: Node, rest: IntArray) -> IntArray:
        """Remove the partial leaf below `node` whose tokens are a prefix of `rest`."""
        at = bisect_left(node.order, rest[: self.page_size].tobytes())
        if at == 0:
            return EMPTY_IDS
        child = node.children[node.order[at - 1]]
        count = len(child.tokens)
        if count >= self.page_size or child.locks or child.media:
            return EMPTY_IDS
        if common_prefix_len(child.tokens, rest) < count:
            return EMPTY_IDS
        return self.nodes.remove(child)
