"""Longest-prefix cache over token ids: which KV pages already hold the start of a prompt."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.runtime.cache.events import TreeEvent
from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.ghosts import Ghosts
from sylvan.runtime.cache.types import (
    CacheKey,
    Node,
    common_prefix_len,
    digests,
    media_divergence,
    overlapping,
)

MAX_EVENTS = 100_000
HEAP_SLACK = 1024  # stale heap entries tolerated before a rebuild


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens in whole pages end at `node`; `tail` is a page whose first tokens fit too.

    `state` is the slot of the recurrent state after all of them; `known` tokens are cached without
    one being there.
    """

    node: Node
    length: int
    tail: tuple[int, int] | None = None  # (page, tokens)
    state: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True)
class Insertion:
    """`length` leading tokens now end at `node`, `cached` of which were there before.

    `freed` are pages that the new entry made superfluous; the caller owns them now.
    """

    node: Node
    length: int
    cached: int
    freed: IntArray


class RadixCache:
    """Radix tree of cached prefixes (RadixAttention, arXiv:2312.07104 s3), one root a namespace.

    Owns each page given to `insert` until `evict` or an `Insertion.freed` returns it. Invariants,
    checked in tests: a parent has at least as many locks as any child; a locked node is never
    evicted; `evictable_pages` is the number of pages of unlocked nodes; only leaves end inside a
    page; siblings never share a whole page.
    """

    def __init__(self, page_size: int, eviction: EvictionPolicy) -> None:
        self.page_size = page_size
        self.evictable_pages = 0
        self.total_pages = 0
        self.num_nodes = 0
        self.version = 0  # changes whenever a match could change
        self.ghosts = Ghosts()
        self._eviction = eviction
        self._clock = itertools.count(1)
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._events: deque[TreeEvent] | None = None

    # ---- reading

    def peek(self, key: CacheKey, limit: int) -> int:
        """Tokens of `key` that a `match` now would find, at most `limit`; changes nothing."""
        node = self._roots.get(key.namespace)
        tokens, pos = key.tokens[:limit], 0
        while node is not None:
            child = node.children.get(self._page_key(key, pos, len(tokens)))
            if child is None:
                return pos + self._tail(node, tokens, key, pos)[1]
            shared = self._shared(child, key, tokens, pos)
            if shared < len(child.tokens):
                return pos + shared
            node, pos = child, pos + shared
        return 0

    def may_hit(self, key: CacheKey) -> bool:
        """Whether the first page of `key` is cached: a cheap test before `peek`.

        A hit inside the first page is not looked for.
        """
        root = self._roots.get(key.namespace)
        return root is not None and self._page_key(key, 0, len(key.tokens)) in root.children

    def match(self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0) -> Match:
        """Find the longest cached prefix of `key`, at most `limit` tokens, and mark it used.

        A tail inside a page is offered only if an earlier step than `step` computed it.
        """
        tokens = key.tokens[:limit]
        node, length = self._descend(key, tokens, priority)
        page, count, born = self._tail(node, tokens, key, length)
        return Match(node, length, (page, count) if count and born < step else None)

    def pages(self, node: Node) -> IntArray:
        """Pages of the whole prefix ending at `node`, in token order."""
        parts = [n.pages for n in self._path(node)]
        return np.concatenate(parts[::-1]) if parts else EMPTY_IDS

    def all_pages(self) -> Iterator[IntArray]:
        """The pages the tree owns, node by node."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node.pages

    def roots(self) -> dict[str, Node]:
        """Namespace -> root. Read only."""
        return self._roots

    # ---- changing

    def insert(
        self, key: CacheKey, pages: IntArray, *, with_tail: bool, step: int = 0, priority: int = 0
    ) -> Insertion:
        """Take ownership of the pages of `key` that are not cached yet.

        The caller still owns its pages for the first `cached` tokens, and the page after the last
        whole one unless `with_tail`.
        """
        tokens = key.tokens if with_tail else key.tokens[: self._align(len(key.tokens))]
        node, cached = self._descend(key, tokens, priority)
        rest = tokens[cached:]
        if len(rest) < self.page_size and self._tail(node, tokens, key, cached)[1] == len(rest):
            return Insertion(node, cached, cached, EMPTY_IDS)
        freed = self._drop_subsumed(node, rest)
        first = cached // self.page_size
        leaf = Node(
            rest.copy(),
            pages[first : first - (-len(rest) // self.page_size)].copy(),
            node,
            start=cached,
            media=overlapping(key.media, cached, len(tokens)),
            namespace=key.namespace,
            created=next(self._clock),
            priority=priority,
            born=step,
        )
        leaf.last_used = leaf.created
        self._attach(node, leaf)
        return Insertion(leaf, len(tokens), cached, freed)

    def lock(self, node: Node) -> None:
        """Protect the prefix ending at `node` from eviction."""
        for n in self._path(node):
            if n.locks == 0:
                self.evictable_pages -= len(n.pages)
            n.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        for n in self._path(node):
            n.locks -= 1
            if n.locks == 0:
                self.evictable_pages += len(n.pages)
                self._offer(n)

    def evict(self, num_pages: int) -> IntArray:
        """Give up at least `num_pages` pages of unlocked nodes, or all there are.

        Leaves are shortened from their end, a whole leaf going only when all of it is needed.
        """
        freed: list[IntArray] = []
        need = num_pages
        while need > 0 and self._heap:
            _, stamp, node = heapq.heappop(self._heap)
            if stamp != node.stamp or node.locks or node.children or node.parent is None:
                continue
            taken = self._shorten(node, min(need, len(node.pages)))
            need -= len(taken)
            freed.append(taken)
        if freed:
            self.version += 1
        return np.concatenate(freed) if freed else EMPTY_IDS

    def clear(self) -> IntArray:
        """Forget everything that is not locked; return its pages."""
        return self.evict(self.evictable_pages)

    # ---- following

    def record_events(self) -> None:
        """Keep events from now on, the newest `MAX_EVENTS` of them."""
        self._events = self._events or deque(maxlen=MAX_EVENTS)

    def take_events(self) -> list[TreeEvent]:
        """Events since the last call."""
        events = list(self._events or ())
        if self._events is not None:
            self._events.clear()
        return events

    # ---- inside

    def _descend(self, key: CacheKey, tokens: IntArray, priority: int) -> tuple[Node, int]:
        """Walk down whole pages, splitting the last edge where `tokens` leave it."""
        root = self._roots.get(key.namespace)
        node, pos = root or Node(EMPTY_IDS, EMPTY_IDS, None, namespace=key.namespace), 0
        while child := node.children.get(self._page_key(key, pos, len(tokens))):
            shared = self._align(self._shared(child, key, tokens, pos))
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.last_used = next(self._clock)
            node.hits += 1
            node.priority = max(node.priority, priority)
            pos += shared
        return node, pos

    def _shared(self, child: Node, key: CacheKey, tokens: IntArray, pos: int) -> int:
        shared = common_prefix_len(child.tokens, tokens[pos:])
        if child.media or key.media:
            shared = media_divergence(child.media, key.media, pos, pos + shared) - pos
        return shared

    def _tail(self, node: Node, tokens: IntArray, key: CacheKey, pos: int) -> tuple[int, int, int]:
        """Page below `node` that shares most of the tokens from `pos` on: (page, tokens, born).

        The child sharing the longest start with a key is its neighbour in sorted order.
        """
        if self.page_size == 1 or pos >= len(tokens) or not node.order:
            return 0, 0, 0
        rest = tokens[pos : pos + self.page_size]
        at = bisect_left(node.order, rest.tobytes())
        best = (0, 0, 0)
        for name in node.order[max(0, at - 1) : at + 1]:
            child = node.children[name]
            count = min(self._shared(child, key, tokens, pos), len(rest))
            if count > best[1]:
                best = (int(child.pages[0]), count, child.born)
        return best

    def _attach(self, parent: Node, leaf: Node) -> None:
        name = self._node_key(leaf)
        assert name not in parent.children
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        parent.children[name] = leaf
        insort(parent.order, name)
        self.evictable_pages += len(leaf.pages)
        self.total_pages += len(leaf.pages)
        self.num_nodes += 1
        self.version += 1
        self._offer(leaf)
        self._note("insert", leaf, leaf.tokens)

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        name = self._node_key(leaf)
        del parent.children[name]
        del parent.order[bisect_left(parent.order, name)]
        self.num_nodes -= 1
        leaf.parent, leaf.stamp = None, -1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    def _shorten(self, leaf: Node, count: int) -> IntArray:
        """Take the last `count` pages of an unlocked leaf; without any left it goes."""
        keep = len(leaf.pages) - count
        taken = leaf.pages[keep:]
        self.evictable_pages -= count
        self.total_pages -= count
        gone = leaf.tokens[keep * self.page_size :]
        self._note("evict", leaf, gone)
        start = leaf.stop - len(gone)
        name = gone[: self.page_size].tobytes() + digests(leaf.media, start, start + self.page_size)
        before = self._token_before(leaf, keep * self.page_size)
        self.ghosts.note(leaf.namespace, start, before, name)
        if keep == 0:
            self._detach(leaf)
        else:
            leaf.tokens = leaf.tokens[: keep * self.page_size].copy()
            leaf.pages = leaf.pages[:keep].copy()
            self._offer(leaf)
        return taken

    def _token_before(self, node: Node, at: int) -> int:
        if at:
            return int(node.tokens[at - 1])
        above = node.parent
        return int(above.tokens[-1]) if above is not None and len(above.tokens) else -1

    def _drop_subsumed(self, node: Node, rest: IntArray) -> IntArray:
        """Remove the leaf below `node` whose tokens, less than a page, all begin `rest`."""
        at = bisect_left(node.order, rest[: self.page_size].tobytes())
        if self.page_size == 1 or at == 0:
            return EMPTY_IDS
        child = node.children[node.order[at - 1]]
        count = len(child.tokens)
        if count >= self.page_size or child.locks or child.media:
            return EMPTY_IDS
        if common_prefix_len(child.tokens, rest) < count:
            return EMPTY_IDS
        return self._shorten(child, len(child.pages))

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` in two at token `at`; return the upper half, which keeps its locks."""
        parent, pages = node.parent, at // self.page_size
        assert parent is not None
        name = self._node_key(node)
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
            born=node.born,
        )
        parent.children[name] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[pages:], upper
        node.start += at
        node.media = overlapping(node.media, node.start, node.stop)
        lower = self._node_key(node)
        upper.children[lower] = node
        upper.order.append(lower)
        self.num_nodes += 1
        return upper

    def _offer(self, node: Node) -> None:
        """Put a node that may be evicted on the heap; an older entry of it becomes stale."""
        if node.locks or node.children:
            return
        node.stamp = next(self._clock)
        heapq.heappush(self._heap, (self._eviction(node), node.stamp, node))
        if len(self._heap) > 2 * self.num_nodes + HEAP_SLACK:
            self._heap = [e for e in self._heap if e[1] == e[2].stamp and not e[2].locks]
            heapq.heapify(self._heap)

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _page_key(self, key: CacheKey, pos: int, end: int) -> bytes:
        stop = pos + self.page_size
        if stop > end:
            return b""
        name = key.tokens[pos:stop].tobytes()
        return name + digests(key.media, pos, stop) if key.media else name

    def _node_key(self, node: Node) -> bytes:
        name = node.tokens[: self.page_size].tobytes()
        if not node.media:
            return name
        return name + digests(node.media, node.start, node.start + self.page_size)

    def _align(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def _note(self, kind: Literal["insert", "evict"], node: Node, tokens: IntArray) -> None:
        if self._events is not None:
            path = [node, *self._path(node.parent)] if node.parent else [node]
            whole = np.concatenate([n.tokens for n in reversed(path)])
            media = tuple({span: None for n in reversed(path) for span in n.media})
            key = CacheKey(whole, node.namespace, media)
            self._events.append(TreeEvent(kind, key, node.stop - len(tokens)))
