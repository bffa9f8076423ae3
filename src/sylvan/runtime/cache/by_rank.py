"""KV memory with data-parallel attention: one cache per group of ranks, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.audit import Repairs
from sylvan.runtime.cache.manager import Copy, KVCacheManager
from sylvan.runtime.cache.prefix import ANY, PrefixCache
from sylvan.runtime.cache.types import CacheKey, KVHandle, Node
from sylvan.runtime.cache.windows import WindowPages

_SPREAD = 2
"""A group may have this many more requests than another one to reuse a cached prefix."""


class Prefixes:
    """Read-only view of the prefix trees of all caches."""

    def __init__(self, trees: Sequence[PrefixCache]) -> None:
        self._trees = tuple(trees)
        self._roots = _Roots([tree.roots() for tree in trees])

    def peek(self, key: CacheKey, limit: int, load: int = ANY) -> int:
        """Number of tokens of the longest prefix in any tree."""
        return max(tree.peek(_fresh(key), limit, load) for tree in self._trees)

    def first_page(self, key: CacheKey) -> bytes:
        """See `PrefixCache`."""
        return self._trees[0].first_page(key)

    def roots(self) -> Mapping[str, Node]:
        """Maps namespaces to roots with the children of all trees; built on access."""
        return self._roots


class _Roots(Mapping[str, Node]):
    def __init__(self, parts: Sequence[Mapping[str, Node]]) -> None:
        self._parts = parts

    def __getitem__(self, namespace: str) -> Node:
        found = [part[namespace] for part in self._parts if namespace in part]
        if not found:
            raise KeyError(namespace)
        if len(found) == 1:
            return found[0]
        children = {name: child for root in found for name, child in root.children.items()}
        return replace(found[0], children=children)

    def __iter__(self) -> Iterator[str]:
        return iter({namespace for part in self._parts for namespace in part})

    def __len__(self) -> int:
        return len({namespace for part in self._parts for namespace in part})


class CachesByRank:
    """Like `KVCacheManager`; consists of one manager for each group of ranks.

    A new request goes to the group that caches the longest prefix of it, unless that group has many
    more requests than another, or no free memory. It stays there until it releases its memory;
    `KVHandle.rank` is the group. Prefixes are shared only within a group.

    Args:
        parts: By group of ranks; their page numbers do not overlap.
    """

    states = None
    loads = None
    spare_pages = 0

    def __init__(self, parts: Sequence[KVCacheManager]) -> None:
        self.parts = tuple(parts)
        self.page_size = parts[0].page_size
        self.tree = Prefixes([part.tree for part in parts])
        self._held = [0] * len(parts)  # requests, by group

    @property
    def windows(self) -> Sequence[WindowPages]:
        """Window groups of all parts."""
        return [window for part in self.parts for window in part.windows]

    @property
    def total_tokens(self) -> int:
        """Most tokens that one request can hold in an empty cache."""
        return self.parts[0].total_tokens

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step can always compute for one request in an empty cache."""
        return self.parts[0].max_step_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that fit now, counting evictable pages as free."""
        return sum(part.available_tokens for part in self.parts)

    @property
    def cached_tokens(self) -> int:
        """Evictable tokens in the prefix caches."""
        return sum(part.cached_tokens for part in self.parts)

    @property
    def used_tokens(self) -> int:
        """Tokens that requests hold, and the capacity, of the fullest KV group of each part."""
        return sum(part.used_tokens for part in self.parts)

    @property
    def evicted_pages(self) -> int:
        """Pages evicted because memory was short."""
        return sum(part.evicted_pages for part in self.parts)

    def acquire(
        self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0, load: int = ANY
    ) -> KVHandle:
        """Borrow the longest cached prefix of `key` in one of the groups, which is chosen here."""
        rank = self._choose(key, limit)
        kv = self.parts[rank].acquire(_fresh(key), limit, step=step, priority=priority, load=load)
        kv.rank = rank
        self._held[rank] += 1
        return kv

    def extend(self, kv: KVHandle, num_tokens: int, *, computed: int = 0) -> bool:
        """Grow `kv` to hold `num_tokens` in all; False, changing nothing, if memory is short."""
        return self.parts[kv.rank].extend(kv, num_tokens, computed=computed)

    def grow(self, handles: Sequence[KVHandle]) -> IntArray | None:
        """Return None, so that the caller extends the handles one by one."""
        del handles

    def publish(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Add the whole pages of the first `num_tokens` of `tokens` to the prefix cache."""
        self.parts[kv.rank].publish(kv, num_tokens, tokens, step=step, priority=priority)

    def release(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Publish the first `num_tokens` of `tokens`, then free `kv`, which is invalid then."""
        self.parts[kv.rank].release(kv, num_tokens, tokens, step=step, priority=priority)
        self._held[kv.rank] -= 1

    def take_copies(self) -> Sequence[Copy]:
        """Page copies to execute before the next forward pass."""
        return [copy for part in self.parts for copy in part.take_copies()]

    def clear(self) -> None:
        """Forget all cached prefixes that no request uses."""
        for part in self.parts:
            part.clear()

    def audit(self, handles: Sequence[KVHandle]) -> Repairs:
        """Reclaim pages and locks without an owner."""
        found = Repairs()
        for rank, part in enumerate(self.parts):
            found += part.audit([kv for kv in handles if kv.rank == rank])
        return found

    def _choose(self, key: CacheKey, limit: int) -> int:
        """Choose the group for a new request."""
        need, fewest = len(key.tokens) + self.page_size, min(self._held)

        def rank_order(rank: int) -> tuple[bool, bool, int, int, int]:
            part, held = self.parts[rank], self._held[rank]
            cached, room = part.peek(_fresh(key), limit), part.available_tokens
            return room >= need - cached, held <= fewest + _SPREAD, cached, -held, room

        return max(range(len(self.parts)), key=rank_order)


KVMemory = KVCacheManager | CachesByRank
"""KV caches of a scheduler."""


def capacity_tokens(cache: KVMemory) -> int:
    """Return how many tokens all requests together can hold."""
    count = len(cache.parts) if isinstance(cache, CachesByRank) else 1
    return count * cache.total_tokens


def _fresh(key: CacheKey) -> CacheKey:
    """Return the key without the cursor of its last lookup, which was in another tree."""
    return CacheKey(key.tokens, key.namespace, key.media, key.first)
