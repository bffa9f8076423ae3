"""Loads of KV from lower tiers to the device, for waiting requests.

A load owns its target pages until it succeeds, so that a failed or abandoned load leaves no page
that a later match could find.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.matching import path_to, walk
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import Match
from sylvan.runtime.cache.residency import Residency, parts_of
from sylvan.runtime.cache.states import StateSlots
from sylvan.runtime.cache.tree import NodeTree
from sylvan.runtime.cache.types import (
    ABSENT,
    CacheKey,
    KVHandle,
    Load,
    Node,
    PageLoad,
    Place,
    StateLoad,
)
from sylvan.runtime.cache.windows import WindowPages


class Loads:
    """Starts and ends loads. Group 0 is the first group, followed by window groups."""

    def __init__(
        self,
        nodes: NodeTree,
        residency: Residency,
        allocator: PageAllocator,
        windows: Sequence[WindowPages],
        states: StateSlots | None,
    ) -> None:
        self._nodes, self.residency = nodes, residency
        self._allocators = (allocator, *(window.allocator for window in windows))
        self._windows, self._states = windows, states
        self._running: dict[int, Load] = {}
        self._numbers = itertools.count(1)

    @property
    def running(self) -> Sequence[Load]:
        """Loads in progress."""
        return tuple(self._running.values())

    def take(self) -> tuple[Load, ...]:
        """Return the loads to start now; after this, only a report ends them."""
        new = tuple(load for load in self._running.values() if not load.taken)
        for load in new:
            load.taken = True
        return new

    def targets(self, group: int) -> list[IntArray]:
        """Pages of a group that loads are filling."""
        loads = self._running.values()
        return [p.targets for load in loads for p in load.pages if p.group == group]

    def plan(self, match: Match, kv: KVHandle) -> list[PageLoad]:
        """List the pages that the handle lacks, by tier; assigns no targets yet."""
        found: list[PageLoad] = []
        size = self._nodes.page_size
        for node in reversed([*path_to(match.node)]):
            entries = np.arange(node.start // size, -(-node.stop // size), dtype=np.int32)
            lower = parts_of(node).lower
            if not len(node.pages):
                place = next(place for place in self.residency.places if place in lower)
                found.append(PageLoad(0, place, entries, lower[place].pages))
            for group, table in enumerate(kv.windows, 1):
                lacking = (entries >= table.first) & (table.pages[entries] == 0)
                for place in self.residency.places:
                    if place in lower and lower[place].windows:
                        sources = lower[place].windows[group - 1]
                        there = lacking & (sources != ABSENT)
                        if there.any():
                            found.append(PageLoad(group, place, entries[there], sources[there]))
                        lacking &= ~there
        return found

    def begin(self, match: Match, kv: KVHandle, pages: Sequence[PageLoad]) -> None:
        """Assign targets, which must be free, and attach the load to the handle."""
        load = Load(next(self._numbers), match.node, kv, tuple(pages))
        for part in load.pages:
            part.targets = self._allocators[part.group].alloc(len(part.entries))
        if kv.state is not None and not match.state:
            load.state = self._plan_state(match.node, kv.state.slot)
            kv.state.source = kv.state.slot
        self._nodes.lock(match.node)
        for node in path_to(match.node):
            parts_of(node).readers += 1
        kv.loading = self._running[load.number] = load

    def abandon(self, kv: KVHandle) -> None:
        """Detach the load from a request that ended; the load keeps its targets until it ends."""
        load, kv.loading = kv.loading, None
        assert load is not None
        load.kv = None
        if load.state is not None:
            kv.state = None  # its slot is a target
        if not load.taken:
            self._free_targets(load)
            self._end(load)
            self._nodes.unlock(load.node)

    def succeed(self, number: int) -> KVHandle | None:
        """Move the loaded pages to their nodes; return the waiting handle, if any."""
        load = self._running[number]
        kv = load.kv
        for node in reversed([*path_to(load.node)]):
            for part in load.pages:
                self._arrive(node, part, kv)
        self._end(load)
        if kv is not None:
            kv.loaded = self._brought(load, Place.STORAGE)
            kv.from_host = self._brought(load, Place.HOST)
            self._nodes.unlock(kv.node)
            kv.node = load.node  # with the lock of the load
            return kv
        self._nodes.unlock(load.node)
        if load.state is not None and self._states is not None:
            self._states.keep_or_free(load.node, load.state.target)
        return None

    def fail(self, number: int) -> KVHandle | None:
        """Forget the pages that could not be loaded; return the waiting handle, if any.

        The handle is useless then, and must be released.
        """
        load = self._running[number]
        self._free_targets(load)
        self._end(load)
        self._nodes.unlock(load.node)
        path = [*path_to(load.node)]
        if load.state is not None:
            self._forget(load.node, load.state.place)
        for node in path:
            for part in load.pages:
                if _of_node(part, node, self._nodes.page_size).any():
                    self._forget(node, part.place)
        self.residency.collect()
        return load.kv

    def will_load(self, key: CacheKey, limit: int) -> bool:
        """Whether a load in progress has some of the first `limit` tokens of `key`.

        A request that waits for it need not load them again.
        """
        if not self._running:
            return False
        root = self._nodes.roots.get(key.namespace)
        path = walk(root, key, limit, self._nodes.page_size).path
        return any(not len(node.pages) and parts_of(node).readers for node, _ in path)

    # ---- inside

    def _brought(self, load: Load, place: Place) -> int:
        """Tokens that a load read from one tier."""
        parts = (part for part in load.pages if not part.group and part.place is place)
        return sum(len(part.entries) for part in parts) * self._nodes.page_size

    def _plan_state(self, node: Node, slot: int) -> StateLoad:
        lower = parts_of(node).lower
        places = (place for place in self.residency.places if place in lower)
        place = next(place for place in places if lower[place].state != ABSENT)
        return StateLoad(place, lower[place].state, slot)

    def _arrive(self, node: Node, part: PageLoad, kv: KVHandle | None) -> None:
        """Give a node its loaded pages, unless it received others meanwhile."""
        own = _of_node(part, node, self._nodes.page_size)
        entries, targets = part.entries[own], part.targets[own]
        if not len(entries):
            return
        if part.group:
            window = self._windows[part.group - 1]
            for entry, target in zip(entries.tolist(), targets.tolist(), strict=True):
                page = window.fill(node, entry, target, hold=kv is not None)
                if kv is not None:
                    kv.windows[part.group - 1].pages[entry] = page
            return
        if len(node.pages):
            self._allocators[0].free(targets)
        else:
            self._nodes.fill(node, targets)
        if kv is not None:
            kv.pages[entries] = node.pages

    def _end(self, load: Load) -> None:
        """End a load, but keep its lock."""
        del self._running[load.number]
        if load.kv is not None:
            load.kv.loading = None
        for node in path_to(load.node):
            parts_of(node).readers -= 1

    def _forget(self, node: Node, place: Place) -> None:
        """Record that a node is no longer in a tier, unless another load is reading it there."""
        parts = parts_of(node)
        if node.parent is not None and place in parts.lower and not parts.readers:
            self._nodes.forget_lower(node, place)

    def _free_targets(self, load: Load) -> None:
        for part in load.pages:
            self._allocators[part.group].free(part.targets)
        if load.state is not None and load.kv is None and self._states is not None:
            self._states.give(load.state.target)


def _of_node(part: PageLoad, node: Node, page_size: int) -> NDArray[np.bool_]:
    """The pages of a load that belong to a node."""
    first, stop = node.start // page_size, -(-node.stop // page_size)
    return (part.entries >= first) & (part.entries < stop)
