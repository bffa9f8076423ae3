"""The scheduler's one door to KV memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.audit import Repairs, agrees, locks_of
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import PrefixCache
from sylvan.runtime.cache.states import StateSlots
from sylvan.runtime.cache.types import CacheKey, KVHandle

Copy = tuple[int, int, int]
"""(source page, destination page, tokens), as in `Batch.copies`."""


_SLACK = 64  # pages evicted beyond need: a call costs as much as a leaf does, whatever its size


class KVCacheManager:
    """Joins the prefix cache and the page allocator. Knows tokens, not requests.

    A page has one owner at any time: the allocator, a handle, or the tree. `extend` moves pages
    allocator -> handle, `publish` handle -> tree, eviction tree -> allocator. Models with recurrent
    layers have `states` too, and their tree is a `StateRadix` over the same slots, or caches
    nothing.
    """

    def __init__(
        self, allocator: PageAllocator, tree: PrefixCache, states: StateSlots | None = None
    ) -> None:
        self.page_size = allocator.page_size
        self.tree = tree  # to look at; only this class changes it
        self.states = states
        self._allocator = allocator
        self._tree = tree
        self._copies: list[Copy] = []
        self._evicted_short = False
        self._slack = min(_SLACK, allocator.num_pages // 128)

    @property
    def total_tokens(self) -> int:
        """Tokens that fit when nothing else is there."""
        return self._allocator.num_pages * self.page_size

    @property
    def available_tokens(self) -> int:
        """Tokens that fit now, evicting what may be evicted."""
        return (self._allocator.free_pages + self._tree.evictable_pages) * self.page_size

    @property
    def cached_tokens(self) -> int:
        """Tokens in the prefix cache that may be evicted."""
        return self._tree.evictable_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens of memory that requests hold."""
        return self.total_tokens - self.available_tokens

    @property
    def version(self) -> int:
        """Changes whenever `peek` could give another answer."""
        return self._tree.version

    def peek(self, key: CacheKey, limit: int) -> int:
        """Tokens of `key` that are cached, at most `limit`; changes nothing."""
        return self._tree.peek(key, limit)

    def acquire(self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0) -> KVHandle:
        """Borrow the longest cached prefix of `key`, at most `limit` tokens."""
        match = self._tree.match(key, limit, step=step, priority=priority)
        self._tree.lock(match.node)
        pages = self._tree.pages(match.node)
        cached = match.length + (match.tail[1] if match.tail else 0)
        kv = KVHandle(match.node, key, pages, len(pages), len(pages), cached, match.tail)
        if self.states is not None:
            kv.state = self.states.begin(match, cached)
        return kv

    def reserve(self, key: CacheKey, num_tokens: int) -> KVHandle | None:
        """An empty handle with room for `num_tokens`, filled from elsewhere; None if short."""
        kv = self.acquire(key, 0)
        ready = self.states is None or kv.state is not None
        return kv if ready and self.extend(kv, num_tokens) else None

    def extend(self, kv: KVHandle, num_tokens: int) -> bool:
        """Grow `kv` to hold `num_tokens` in all; False, changing nothing, if memory is short."""
        held = kv.num_pages
        count = -(-num_tokens // self.page_size) - held
        if count <= 0:
            return True
        has_room = count == 1 and held < len(kv.pages) and kv.tail is None
        if has_room and (page := self._allocator.alloc_one()):
            # most calls by far: a decoding request needs its next page
            kv.pages[held] = page
            kv.num_pages = held + 1
            return True
        if not self._make_free(count):
            return False
        self._append(kv, self._allocator.alloc(count))
        if kv.tail:
            page, tokens = kv.tail
            self._copies.append((page, int(kv.pages[kv.shared]), tokens))
            kv.tail = None
        return True

    def grow(self, handles: Sequence[KVHandle]) -> bool:
        """A page more for each of these; False, giving none to any, if memory is short."""
        if any(kv.tail for kv in handles) or not self._make_free(len(handles)):
            return False
        for kv, page in zip(handles, self._allocator.alloc(len(handles)).tolist(), strict=True):
            held = kv.num_pages
            if held == len(kv.pages):
                self._make_room(kv, held + 1)
            kv.pages[held] = page
            kv.num_pages = held + 1
        return True

    def publish(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Let others share the whole pages of the first `num_tokens` of `tokens`.

        Their KV is computed by `step` or earlier. Does nothing if all of them are shared already.
        """
        if num_tokens // self.page_size <= kv.shared:
            return
        self._insert(kv, tokens[:num_tokens], step=step, priority=priority, with_tail=False)

    def release(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Publish the first `num_tokens` of `tokens`, then give all back; `kv` is dead then."""
        if num_tokens > kv.shared * self.page_size:
            self._insert(kv, tokens[:num_tokens], step=step, priority=priority, with_tail=True)
        if self.states is not None:
            self.states.end(kv, _part(kv, tokens, num_tokens))
        self._tree.unlock(kv.node)
        self._allocator.free(kv.pages[kv.shared : kv.num_pages])
        kv.num_pages = kv.shared = 0

    def take_copies(self) -> tuple[Copy, ...]:
        """Page copies to be done before the next forward pass."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def clear(self) -> None:
        """Forget all cached prefixes that no request uses."""
        self._allocator.free(self._tree.clear())

    def audit(self, handles: Sequence[KVHandle]) -> Repairs:
        """Take back what neither the allocator, nor the tree, nor one of `handles` owns.

        These are pages, locks of the tree, and slots of recurrent state. Cheap unless something
        disagrees: looked at are counts, `handles` and the nodes above them.
        """
        locks = locks_of(kv.node for kv in handles)
        wrong = 0
        if self._evicted_short or not agrees(self._tree, locks):
            self._evicted_short = False
            wrong = self._tree.restore(locks)
        slots = [kv.state.slot for kv in handles if kv.state is not None]
        states = self.states.audit(slots) if self.states is not None else 0
        return Repairs(self._audit_pages(handles), wrong, states)

    def _audit_pages(self, handles: Sequence[KVHandle]) -> int:
        """Free + tree + handles = total, or else those that are missing are freed."""
        held = sum(kv.num_pages - kv.shared for kv in handles)
        free = self._allocator.free_pages
        if free + self._tree.total_pages + held == self._allocator.num_pages:
            return 0
        owned = self._allocator.free_mask()
        for kv in handles:
            owned[kv.pages[kv.shared : kv.num_pages]] = True
        for pages in self._tree.all_pages():
            owned[pages] = True
        lost = np.flatnonzero(~owned).astype(np.int32)
        self._allocator.free(lost)
        return len(lost)

    def _insert(
        self, kv: KVHandle, tokens: IntArray, *, step: int, priority: int, with_tail: bool
    ) -> None:
        size = self.page_size
        key = _part(kv, tokens, len(tokens))
        done = self._tree.insert(
            key, kv.view(), with_tail=with_tail, step=step, priority=priority, held=kv.node
        )
        self._allocator.free(done.freed)
        # ---- pages of kv: [0, shared) the tree's | [shared, known) ours, computed twice |
        #      [known, given) ours until now, the tree's from now on | [given, num_pages) ours
        known, given = done.cached // size, -(-done.length // size)
        if known > kv.shared:
            self._allocator.free(kv.pages[kv.shared : known])
            kv.pages[:known] = self._tree.pages(done.node)[:known]
            kv.version += 1
        kv.node, kv.shared = done.node, max(given, kv.shared)

    def _make_free(self, count: int) -> bool:
        """Evict until so many pages are free, if that can be."""
        short = count - self._allocator.free_pages
        if short <= 0:
            return True
        if short > self._tree.evictable_pages:
            return False
        # a little more than needed, so that not each token of each request evicts its page
        wanted = min(short + self._slack, self._tree.evictable_pages)
        evicted = self._tree.evict(wanted)
        self._evicted_short |= len(evicted) < wanted  # some leaf is not found: for the next audit
        self._allocator.free(evicted)
        # or else evicted pages are still being written back
        return count <= self._allocator.free_pages

    def _make_room(self, kv: KVHandle, need: int) -> None:
        """A buffer for so many page numbers."""
        room = np.empty(max(need, 2 * len(kv.pages), 8), np.int32)
        room[: kv.num_pages] = kv.view()
        kv.pages = room

    def _append(self, kv: KVHandle, pages: IntArray) -> None:
        need = kv.num_pages + len(pages)
        if need > len(kv.pages):
            self._make_room(kv, need)
        kv.pages[kv.num_pages : need] = pages
        kv.num_pages = need


def _part(kv: KVHandle, tokens: IntArray, num_tokens: int) -> CacheKey:
    return CacheKey(tokens[:num_tokens], kv.key.namespace, kv.key.media)
