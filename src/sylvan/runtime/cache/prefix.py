"""The interface of a prefix cache, and an implementation that caches nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.runtime.cache.types import CacheKey, Node

ANY = sys.maxsize
"""As `load` limit: load everything that lower tiers have."""


@dataclass(slots=True, eq=False)
class Match:
    """A cached prefix: `length` tokens in whole pages that end at `node`.

    Attributes:
        tail: The leaf below `node` whose first page matches `tail_tokens` more tokens.
        state: Device slot of the recurrent state after all of them; 0: none, or in a lower tier.
        cached_tokens: Cached tokens in whole pages, even if some KV group cannot continue from
          there.
        loads: Whether some of the KV must be loaded from lower tiers.
    """

    node: Node
    length: int
    tail: Node | None = None
    tail_tokens: int = 0
    state: int = 0
    cached_tokens: int = 0
    loads: bool = False

    @property
    def total(self) -> int:
        """Tokens of the prefix."""
        return self.length + self.tail_tokens


@dataclass(slots=True, eq=False)
class Insertion:
    """`length` leading tokens now end at `node`; the first `cached` were on the device before.

    `freed` are pages that the new entry replaced; the caller now owns them.
    """

    node: Node
    length: int
    cached: int
    freed: IntArray


class PrefixCache(Protocol):
    """Owns pages that hold the KV of known prefixes. See `RadixCache` for the full contract."""

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` could return."""
        ...

    @property
    def total_pages(self) -> int:
        """Number of pages that the cache owns."""
        ...

    def peek(self, key: CacheKey, limit: int, load: int = ANY) -> int:
        """Number of tokens that `match` would find; changes nothing."""
        ...

    def first_page(self, key: CacheKey) -> bytes:
        """Child key of the first page of `key`; empty if `key` is shorter."""
        ...

    def roots(self) -> Mapping[str, Node]:
        """Maps namespaces to roots; always the same mapping. Read only."""
        ...

    def match(
        self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0, load: int = 0
    ) -> Match:
        """Find the longest cached prefix of `limit` tokens; of `load` tokens with lower tiers."""
        ...

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
        """Take ownership of the pages that are not cached yet."""
        ...

    def pages(self, node: Node) -> IntArray:
        """Pages of the whole prefix ending at `node`."""
        ...

    def all_pages(self) -> Iterator[IntArray]:
        """Yield the pages that the cache owns, in any order."""
        ...

    def lock(self, node: Node) -> None:
        """Protect the prefix ending at `node` from eviction."""
        ...

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        ...

    def evict(self, num_pages: int) -> IntArray:
        """Evict `num_pages` pages, or as many as possible."""
        ...

    def clear(self) -> IntArray:
        """Evict everything that is not locked."""
        ...

    def repair_locks(self, locks: Mapping[Node, int]) -> int:
        """Set the locks to these counts; return how many nodes were wrong."""
        ...


class NoPrefixCache:
    """Caches nothing: used when prefix caching is off."""

    def __init__(self) -> None:
        self.evictable_pages = 0
        self.total_pages = 0
        self._node = Node(EMPTY_IDS, EMPTY_IDS, parent=None)

    def peek(self, key: CacheKey, limit: int, load: int = ANY) -> int:
        return 0

    def first_page(self, key: CacheKey) -> bytes:
        return b""

    def roots(self) -> Mapping[str, Node]:
        return {}

    def match(
        self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0, load: int = 0
    ) -> Match:
        return Match(self._node, 0)

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
        """Return the pages to the caller."""
        return Insertion(self._node, 0, 0, EMPTY_IDS)

    def pages(self, node: Node) -> IntArray:
        return EMPTY_IDS

    def all_pages(self) -> Iterator[IntArray]:
        return iter(())

    def lock(self, node: Node) -> None:
        pass

    def unlock(self, node: Node) -> None:
        pass

    def evict(self, num_pages: int) -> IntArray:
        return EMPTY_IDS

    def clear(self) -> IntArray:
        return EMPTY_IDS

    def repair_locks(self, locks: Mapping[Node, int]) -> int:
        return 0
