"""Longest-prefix cache over token ids: which KV pages already hold the start of a prompt."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.runtime.cache.events import TreeEvent, event
from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.ghosts import Ghosts
from sylvan.runtime.cache.leaves import Leaves
from sylvan.runtime.cache.types import (
    CacheKey,
    Insertion,
    Match,
    Node,
    Reached,
    below,
    common_prefix_len,
    digests,
    media_divergence,
    overlapping,
)

MAX_EVENTS = 100_000
_TOKEN_BYTES = 4


class RadixCache:
    """Radix tree of cached prefixes (RadixAttention, arXiv:2312.07104 s3), one root a namespace.

    Owns each page given to `insert` until `evict` or an `Insertion.freed` returns it. Invariants,
    checked in tests: a parent has at least as many locks as any child; a locked node is never
    evicted; `evictable_pages` is the number of pages of unlocked nodes; only leaves end inside a
    page; siblings never share a whole page.
    """

    def __init__(self, page_size: int, eviction: EvictionPolicy) -> None:
        self.page_size = page_size
        self._ordered = page_size > 1  # children, to look for hits inside a page
        self.evictable_pages = 0
        self.total_pages = 0
        self.num_nodes = 0
        self.version = 0  # changes whenever a match could change
        self.ghosts = Ghosts()
        self._leaves = Leaves(eviction)
        self._clock = itertools.count(1)
        self._roots: dict[str, Node] = {}
        self._events: deque[TreeEvent] | None = None

    # ---- reading

    def peek(self, key: CacheKey, limit: int) -> int:
        """Tokens of `key` that a `match` now would find, at most `limit`; changes nothing.

        Asked again with the same key, it goes on from the node it reached, if that is still there.
        """
        reached = key.reached
        if reached is None or not reached.stands(limit):
            root = self._roots.get(key.namespace)
            if root is None:
                return 0
            reached = Reached(root, 0, self._page_key(key, 0, limit), limit)
        node, pos, name = reached.node, reached.stop, reached.next_page
        tokens = key.tokens[:limit] if self.page_size > 1 or name in node.children else EMPTY_IDS
        while child := node.children.get(name):
            shared = self._shared(child, key, tokens, pos)
            if shared < len(child.tokens):
                break
            node, pos = child, pos + shared
            name = self._page_key(key, pos, limit)
        else:
            shared = self._tail(node, tokens, key, pos)[1]
        if node is not reached.node:
            reached = Reached(node, pos, name, limit)
        key.reached = reached
        return pos + shared

    def first_page(self, key: CacheKey) -> bytes:
        """By which name a root has the first page of `key` among its children; empty if less."""
        return self._page_key(key, 0, len(key.tokens))

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
        return (node.pages for node in below(self._roots.values()))

    def roots(self) -> dict[str, Node]:
        """Namespace -> root; always the same mapping. Read only."""
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
        """Take ownership of the pages of `key` that are not cached yet.

        The caller still owns its pages for the first `cached` tokens, and the page after the last
        whole one unless `with_tail`. A lock of the caller on `held`, where a start of `key` ends,
        moves to the node returned.
        """
        tokens = key.tokens
        if not with_tail and len(tokens) % self.page_size:
            tokens = tokens[: self._align(len(tokens))]
        node, cached = self._descend(key, tokens, priority, held)
        rest = tokens[cached:]
        if len(rest) < self.page_size and self._tail(node, tokens, key, cached)[1] == len(rest):
            self._lock_down(held, node)
            return Insertion(node, cached, cached, EMPTY_IDS)
        freed = self._drop_subsumed(node, rest)
        self._lock_down(held, node)
        first = cached // self.page_size
        now = next(self._clock)
        leaf = Node(
            rest.copy(),
            pages[first : first - (-len(rest) // self.page_size)].copy(),
            node,
            start=cached,
            media=overlapping(key.media, cached, len(tokens)),
            namespace=key.namespace,
            locks=0 if held is None else 1,
            last_used=now,
            created=now,
            priority=priority,
            born=step,
        )
        self._attach(node, leaf)
        return Insertion(leaf, len(tokens), cached, freed)

    def lock(self, node: Node) -> None:
        """Protect the prefix ending at `node` from eviction."""
        while (parent := node.parent) is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while (parent := node.parent) is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable_pages += len(node.pages)
                self._leaves.offer(node)
            node = parent

    def evict(self, num_pages: int) -> IntArray:
        """Give up at least `num_pages` pages of unlocked nodes, or all there are.

        Leaves are shortened from their end, a whole leaf going only when all of it is needed.
        """
        freed: list[IntArray] = []
        need = num_pages
        while need > 0 and (node := self._leaves.pop()):
            taken = self._shorten(node, min(need, len(node.pages)))
            need -= len(taken)
            freed.append(taken)
        if freed:
            self.version += 1
        return np.concatenate(freed) if freed else EMPTY_IDS

    def clear(self) -> IntArray:
        """Forget everything that is not locked; return its pages."""
        return self.evict(self.evictable_pages)

    def restore(self, locks: Mapping[Node, int]) -> int:
        """Lock nodes as often as they should be, count anew, queue leaves; how many differed."""
        wrong = self.evictable_pages = self.total_pages = 0
        for node in below(self._roots.values()):
            want = locks.get(node, 0)
            wrong += node.locks != want or not (want or node.children or node.queued)
            node.locks = want
            self.total_pages += len(node.pages)
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self._leaves.offer(node)
        return wrong

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

    def _descend(
        self, key: CacheKey, tokens: IntArray, priority: int, held: Node | None = None
    ) -> tuple[Node, int]:
        """Walk down whole pages, splitting the last edge where `tokens` leave it.

        The way to a locked node is known, but used too.
        """
        pos, size, clock = 0, self.page_size, self._clock
        if held is None or held.parent is None:
            root = self._roots.get(key.namespace)
            node = root or Node(EMPTY_IDS, EMPTY_IDS, None, namespace=key.namespace)
        else:
            node, pos = held, held.start + len(held.tokens)
            above = [*self._path(held)] if held.parent.parent is not None else [held]
            for used in reversed(above):
                used.use(next(clock), priority)
        while child := node.children.get(self._page_key(key, pos, len(tokens))):
            shared = self._shared(child, key, tokens, pos)
            shared -= shared % size
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.use(next(clock), priority)
            pos += shared
        return node, pos

    def _lock_down(self, held: Node | None, node: Node) -> None:
        """Let a lock that reaches down to `held` reach down to `node`."""
        while held is not None and node is not held and node.parent is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def _shared(self, child: Node, key: CacheKey, tokens: IntArray, pos: int) -> int:
        """Tokens from `pos` on that are those of `child`, which was found by its first page."""
        if child.media or key.media:
            shared = common_prefix_len(child.tokens, tokens[pos:])
            return media_divergence(child.media, key.media, pos, pos + shared) - pos
        if len(child.tokens) == self.page_size:
            return self.page_size
        return common_prefix_len(child.tokens, tokens[pos:])

    def _tail(self, node: Node, tokens: IntArray, key: CacheKey, pos: int) -> tuple[int, int, int]:
        """Page below `node` that shares most of the tokens from `pos` on: (page, tokens, born).

        The child sharing the longest start with a key is its neighbour in sorted order.
        """
        if self.page_size == 1 or pos >= len(tokens) or not node.order:
            return 0, 0, 0
        rest = tokens[pos : pos + self.page_size]
        start, order = rest.tobytes(), node.order
        at = bisect_left(order, start)
        best = (0, 0, 0)
        for name in order[max(0, at - 1) : at + 1]:
            if name[:_TOKEN_BYTES] != start[:_TOKEN_BYTES]:
                continue
            child = node.children[name]
            count = common_prefix_len(child.tokens, rest)
            if child.media or key.media:
                count = media_divergence(child.media, key.media, pos, pos + count) - pos
            if count > best[1]:
                best = (int(child.pages[0]), count, child.born)
        return best

    def _attach(self, parent: Node, leaf: Node) -> None:
        name = self._node_key(leaf)
        assert name not in parent.children
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        parent.adopt(name, leaf, ordered=self._ordered)
        if not leaf.locks:
            self.evictable_pages += len(leaf.pages)
            self._leaves.offer(leaf)
        self.total_pages += len(leaf.pages)
        self.num_nodes += 1
        self.version += 1
        if self._events is not None:
            self._note("insert", leaf, leaf.tokens)

    def _shorten(self, leaf: Node, count: int) -> IntArray:
        """Take the last `count` pages of an unlocked leaf; without any left it goes."""
        keep = len(leaf.pages) - count
        cut = keep * self.page_size
        tokens, pages, above = leaf.tokens, leaf.pages, leaf.parent
        gone, taken = (tokens[cut:], pages[keep:]) if keep else (tokens, pages)
        assert above is not None
        self.evictable_pages -= count
        self.total_pages -= count
        if self._events is not None:
            self._note("evict", leaf, gone)
        start = leaf.start + cut
        name = gone[: self.page_size].tobytes()
        if leaf.media:
            name += digests(leaf.media, start, start + self.page_size)
        past = tokens[:cut] if keep else above.tokens
        self.ghosts.note(leaf.namespace, start, int(past[-1]) if len(past) else -1, name)
        if keep:
            leaf.tokens, leaf.pages = tokens[:cut].copy(), pages[:keep].copy()
            self._leaves.offer(leaf)
        else:
            self._detach(leaf, above, name)
        return taken

    def _detach(self, leaf: Node, parent: Node, name: bytes) -> None:
        parent.disown(name)
        self.num_nodes -= 1
        leaf.parent = None
        self._leaves.forget(leaf)
        if parent.parent is not None:
            self._leaves.offer(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    def _drop_subsumed(self, node: Node, rest: IntArray) -> IntArray:
        """Remove the leaf below `node` whose tokens, less than a page, all begin `rest`."""
        if self.page_size == 1 or not node.order:
            return EMPTY_IDS
        at = bisect_left(node.order, rest[: self.page_size].tobytes())
        if at == 0:
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
        upper.adopt(self._node_key(node), node, ordered=self._ordered)
        self.num_nodes += 1
        return upper

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
            self._events.append(event(kind, path[::-1], node.stop - len(tokens)))
