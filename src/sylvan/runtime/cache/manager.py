"""The scheduler's single interface to KV memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.audit import Repairs, locks_match, locks_of, unowned
from sylvan.runtime.cache.loads import Loads
from sylvan.runtime.cache.matching import path_to
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import ANY, Match, PrefixCache
from sylvan.runtime.cache.states import StateSlots
from sylvan.runtime.cache.types import CacheKey, KVHandle, WindowTable
from sylvan.runtime.cache.windows import WindowPages

Copy = tuple[int, int, int, int]
"""(source page, target page, tokens, KV group)."""


_SLACK = 64  # extra pages per eviction, because each call has the fixed cost of one leaf


class KVCacheManager:
    """Combines the prefix cache and the page allocators. Works on tokens, not requests.

    A page has one owner at any time: an allocator, a handle, the tree, or a load in progress.
    `extend` moves pages allocator -> handle, `publish` handle -> tree, eviction tree -> allocator.
    `windows` exists for sliding-window layers, `states` for recurrent layers, `loads` with lower
    tiers; tree nodes hold pages and slots of these as well.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        tree: PrefixCache,
        states: StateSlots | None = None,
        windows: Sequence[WindowPages] = (),
        loads: Loads | None = None,
        *,
        has_full: bool = True,
    ) -> None:
        """`has_full` is False if pages of `allocator` only count tokens, in window-only models."""
        self.page_size = allocator.page_size
        self.tree = tree  # for reading; only this class changes it
        self.states = states
        self.loads = loads
        self._allocator = allocator
        self._tree = tree
        self._windows = self.windows = tuple(windows)
        self._has_full = has_full
        self._copies: list[Copy] = []
        self._evicted_short = False
        self.evicted_pages = 0  # pages evicted from the prefix cache because memory was short
        self._slack = min(_SLACK, allocator.num_pages // 128)

    @property
    def total_tokens(self) -> int:
        """Most tokens that one request can hold in an empty cache."""
        small = [w for w in self._windows if not w.group.max_step_tokens]
        pages = [self._allocator.num_pages, *(w.allocator.num_pages for w in small)]
        return min(pages) * self.page_size

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step can always compute for one request in an empty cache."""
        total = self.total_tokens
        return min([total, *(w.group.max_step_tokens or total for w in self._windows)])

    @property
    def available_tokens(self) -> int:
        """Tokens that fit now, counting evictable pages as free.

        A window group with less room than one window limits this to its room.
        """
        found = self._available_pages * self.page_size
        for window in self._windows:
            room = window.available_pages * self.page_size
            if room < window.group.window + self.page_size:
                found = min(found, room)
        return found

    @property
    def cached_tokens(self) -> int:
        """Evictable tokens in the prefix cache."""
        return self._tree.evictable_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens that requests hold, and the capacity, of the fullest KV group."""
        pages = self._allocator.num_pages
        share = (pages - self._available_pages) / pages
        for window in self._windows:
            pages = window.allocator.num_pages
            share = max(share, (pages - window.available_pages) / pages)
        return round(share * self.total_tokens)

    @property
    def spare_pages(self) -> int:
        """Pages available without eviction, if requests own only such pages.

        0 for models with window groups or states, and with lower tiers.
        """
        plain = not self._windows and self.states is None and self.loads is None
        return self._allocator.free_pages if plain else 0

    @property
    def _available_pages(self) -> int:
        return self._allocator.free_pages + self._tree.evictable_pages

    def peek(self, key: CacheKey, limit: int, *, on_device: bool = False) -> int:
        """Number of cached tokens of `key`, at most `limit`; changes nothing.

        `on_device`: ignore lower tiers.
        """
        return self._tree.peek(key, limit, 0 if on_device else ANY)

    def acquire(
        self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0, load: int = ANY
    ) -> KVHandle:
        """Borrow the longest cached prefix of `key`, at most `limit` tokens.

        Args:
            key: The request's tokens.
            limit: Longest prefix to borrow.
            step: The step being planned; see `RadixCache.match`.
            priority: The request's priority.
            load: Longest prefix to load from lower tiers. The request must wait while the handle is
                `loading`.
        """
        load = load if self.loads is not None else 0
        match = self._tree.match(key, limit, step=step, priority=priority, load=load)
        kv = self._borrow(key, match)
        if match.loads and self.loads is not None and not self._load(match, kv, self.loads):
            self.release(kv, 0, key.tokens, step=step)
            return self.acquire(key, limit, step=step, priority=priority, load=0)
        return kv

    def extend(self, kv: KVHandle, num_tokens: int, *, computed: int = 0) -> bool:
        """Grow `kv` to hold `num_tokens` in all; False, changing nothing, if memory is short.

        Frees window pages that no token from position `computed` on reads; the planned slice starts
        there.
        """
        held = kv.num_pages
        count = -(-num_tokens // self.page_size) - held
        if count <= 0:
            return True
        if self._windows:
            return self._extend_all(kv, count, computed)
        has_room = count == 1 and held < len(kv.pages) and kv.tail is None
        if has_room and (page := self._allocator.alloc_one()):
            # by far the most frequent case: a decoding request needs its next page
            kv.pages[held] = page
            kv.num_pages = held + 1
            return True
        if not self._make_free(count):
            return False
        self._append(kv, self._allocator.alloc(count))
        if kv.tail:
            self._copy_tail(kv, kv.tail)
        return True

    def grow(self, handles: Sequence[KVHandle]) -> IntArray | None:
        """Add one page to each handle; None, changing nothing, if memory is short.

        All tokens in their present pages must be computed. Returns the pages of the first group.
        """
        if [kv for kv in handles if kv.tail] or not self._make_free(len(handles)):
            return None
        if self._windows and not self._grow_windows(handles):
            return None
        pages = self._allocator.alloc(len(handles))
        for kv, page in zip(handles, pages.tolist(), strict=True):
            held = kv.num_pages
            try:  # checking the length first would cost as much as the rest
                kv.pages[held] = page
            except IndexError:
                self._make_room(kv, held + 1)
                kv.pages[held] = page
            kv.num_pages = held + 1
        return pages

    def publish(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Add the whole pages of the first `num_tokens` of `tokens` to the prefix cache.

        Their KV is computed by `step` or earlier. Does nothing if all of them are already cached.
        """
        if num_tokens // self.page_size <= kv.shared:
            return
        self._insert(kv, tokens[:num_tokens], step=step, priority=priority, with_tail=False)

    def release(
        self, kv: KVHandle, num_tokens: int, tokens: IntArray, *, step: int, priority: int = 0
    ) -> None:
        """Publish the first `num_tokens` of `tokens`, then free `kv`, which is invalid afterwards.

        Targets of a load stay reserved until the load ends.
        """
        if kv.loading is not None and self.loads is not None:
            self.loads.abandon(kv)
        if num_tokens > kv.shared * self.page_size:
            self._insert(kv, tokens[:num_tokens], step=step, priority=priority, with_tail=True)
        if self.states is not None:
            self.states.end(kv, _part(kv, tokens, num_tokens))
        self._tree.unlock(kv.node)
        self._allocator.free(kv.pages[kv.shared : kv.num_pages])
        for window, table in zip(self._windows, kv.windows, strict=True):
            window.release(table, kv.shared, kv.num_pages)
        kv.num_pages = kv.shared = 0

    def take_copies(self) -> Sequence[Copy]:
        """Page copies to execute before the next forward pass.

        Groups count from 0 as in `KVHandle.tables`.
        """
        copies, self._copies = self._copies, []
        return copies

    def clear(self) -> None:
        """Forget all cached prefixes that no request uses, in all tiers."""
        if self.loads is not None:
            self.loads.residency.on_clear()
        self._allocator.free(self._tree.clear())
        if self.loads is not None:
            self.loads.residency.collect()

    def audit(self, handles: Sequence[KVHandle]) -> Repairs:
        """Reclaim pages, locks and state slots without an owner.

        Owners are the allocators, the tree and `handles`. Cheap unless something disagrees: it
        checks counts, `handles` and the nodes above them.
        """
        loads = self.loads.running if self.loads is not None else ()
        locks = locks_of(owner.node for owner in (*handles, *loads))
        wrong = 0
        if self._evicted_short or not locks_match(self._tree, locks):
            self._evicted_short = False
            wrong = self._tree.repair_locks(locks)
        slots = [kv.state.slot for kv in handles if kv.state is not None]
        slots += [load.state.target for load in loads if load.state and load.kv is None]
        states = self.states.audit(slots) if self.states is not None else 0
        repairs = Repairs(self._audit_pages(handles), wrong, states)
        for group, window in enumerate(self._windows):
            repairs += self._audit_window(handles, group, window)
        return repairs

    # ---- memory of requests

    def _borrow(self, key: CacheKey, match: Match) -> KVHandle:
        node, tree = match.node, self._tree
        if match.loads:
            node = next((n for n in path_to(node) if len(n.pages)), tree.roots()[key.namespace])
        tree.lock(node)
        pages = tree.pages(node)
        kv = KVHandle(node, key, pages, len(pages), len(pages), match.length + match.tail_tokens)
        if match.tail is not None:
            kv.tail = int(match.tail.pages[0]), match.tail_tokens
        if self._windows:
            self._borrow_windows(match, kv)
        if self.states is not None:
            kv.state = self.states.begin(match)
        return kv

    def _borrow_windows(self, match: Match, kv: KVHandle) -> None:
        tables: list[WindowTable] = []
        count = match.length // self.page_size
        tail = match.tail.parts if match.tail is not None else None
        for window in self._windows:
            table = WindowTable(kv.pages)
            window.borrow(match.node, table, count, kv.cached)
            table.tail = int(tail.windows[window.index][0]) if tail is not None else 0
            tables.append(table)
        kv.windows, kv.has_full = tuple(tables), self._has_full

    def _load(self, match: Match, kv: KVHandle, loads: Loads) -> bool:
        """Start loading what the handle lacks; False, changing nothing, if memory is short."""
        if self.states is not None and kv.state is None:
            return True  # no state slot is free; the caller releases the handle
        parts = loads.plan(match, kv)
        needs = [0] * (1 + len(self._windows))
        for part in parts:
            needs[part.group] += len(part.entries)
        if not self._make_free(needs[0]):
            return False
        if not all(w.make_free(n) for w, n in zip(self._windows, needs[1:], strict=True)):
            return False
        kv.num_pages = kv.shared = match.length // self.page_size
        kv.pages = np.concatenate([kv.pages, np.zeros(kv.num_pages - len(kv.pages), np.int32)])
        loads.begin(match, kv, parts)
        return True

    def _extend_all(self, kv: KVHandle, count: int, computed: int) -> bool:
        """`extend` in all groups."""
        held = kv.num_pages
        groups = [*zip(self._windows, kv.windows, strict=True)]
        for window, table in groups:
            window.advance(table, kv.shared, held, computed)
        if not self._make_free(count):
            return False
        if not all(w.make_free(w.num_new(held, count, computed)) for w, _ in groups):
            return False
        for window, table in groups:
            window.extend(table, held, count, computed)
        self._append(kv, self._allocator.alloc(count))
        if kv.tail:
            self._copy_tail(kv, kv.tail)
        return True

    def _grow_windows(self, handles: Sequence[KVHandle]) -> bool:
        size = self.page_size
        for number, window in enumerate(self._windows):
            for kv in handles:
                held = kv.num_pages
                window.advance(kv.windows[number], kv.shared, held, held * size)
        if not all(window.make_free(len(handles)) for window in self._windows):
            return False
        for number, window in enumerate(self._windows):
            for kv in handles:
                held = kv.num_pages
                window.extend(kv.windows[number], held, 1, held * size)
        return True

    def _copy_tail(self, kv: KVHandle, tail: tuple[int, int]) -> None:
        """Plan a copy of the start of the page after the shared ones, from a page of the tree."""
        page, tokens = tail
        if self._has_full:
            self._copies.append((page, int(kv.pages[kv.shared]), tokens, 0))
        for group, table in enumerate(kv.windows, int(self._has_full)):
            self._copies.append((table.tail, int(table.pages[kv.shared]), tokens, group))
        kv.tail = None

    def _insert(
        self, kv: KVHandle, tokens: IntArray, *, step: int, priority: int, with_tail: bool
    ) -> None:
        size = self.page_size
        key = _part(kv, tokens, len(tokens))
        done = self._tree.insert(
            key, kv.view(), with_tail=with_tail, step=step, priority=priority, held=kv.node
        )
        self._allocator.free(done.freed)
        # ---- pages of kv: [0, shared) owned by the tree | [shared, known) ours, computed twice |
        #      [known, given) moving from us to the tree | [given, num_pages) ours
        known, given = done.cached // size, -(-done.length // size)
        if known > kv.shared:
            self._allocator.free(kv.pages[kv.shared : known])
            kv.pages[:known] = self._tree.pages(done.node)[:known]
            kv.version += 1
        for window, table in zip(self._windows, kv.windows, strict=True):
            kv.version += window.publish(done.node, table, kv.shared, given)
        kv.node, kv.shared = done.node, max(given, kv.shared)

    # ---- pages

    def _make_free(self, count: int) -> bool:
        """Evict until `count` pages are free, or nothing more can be evicted."""
        short = count - self._allocator.free_pages
        if short <= 0:
            return True
        if short > self._tree.evictable_pages:
            return False
        # evict some extra pages, so that not every token triggers an eviction
        wanted = min(short + self._slack, self._tree.evictable_pages)
        evicted = self._tree.evict(wanted)
        self._evicted_short |= len(evicted) < wanted  # the next audit repairs this
        self.evicted_pages += len(evicted)
        self._allocator.free(evicted)
        return count <= self._allocator.free_pages

    def _make_room(self, kv: KVHandle, need: int) -> None:
        """Return a buffer for that many page numbers."""
        room = np.empty(max(need, 2 * len(kv.pages), 8), np.int32)
        room[: kv.num_pages] = kv.view()
        kv.pages = room

    def _append(self, kv: KVHandle, pages: IntArray) -> None:
        need = kv.num_pages + len(pages)
        if need > len(kv.pages):
            self._make_room(kv, need)
        kv.pages[kv.num_pages : need] = pages
        kv.num_pages = need

    # ---- audit

    def _audit_pages(self, handles: Sequence[KVHandle]) -> int:
        """Check that free + tree + handles + loads = total; free the missing pages otherwise."""
        loading = self.loads.targets(0) if self.loads is not None else []
        held = sum(kv.num_pages - kv.shared for kv in handles) + sum(map(len, loading))
        free = self._allocator.free_pages
        if free + self._tree.total_pages + held == self._allocator.num_pages:
            return 0
        own = [kv.pages[kv.shared : kv.num_pages] for kv in handles]
        lost = unowned(self._allocator.free_mask(), [*own, *loading, *self._tree.all_pages()])
        self._allocator.free(lost)
        return len(lost)

    def _audit_window(
        self, handles: Sequence[KVHandle], group: int, window: WindowPages
    ) -> Repairs:
        borrowed: list[IntArray] = []
        own = self.loads.targets(1 + group) if self.loads is not None else []
        for kv in handles:
            table = kv.windows[group]
            middle = min(max(kv.shared, table.first), kv.num_pages)
            pages = table.pages[table.first : middle]
            borrowed.append(pages[pages != 0])
            own.append(table.pages[max(middle, table.first) : kv.num_pages])
        return Repairs(*window.repair(borrowed, own))


def _part(kv: KVHandle, tokens: IntArray, num_tokens: int) -> CacheKey:
    return CacheKey(tokens[:num_tokens], kv.key.namespace, kv.key.media)
