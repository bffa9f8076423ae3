"""The host tier as the prefix tree sees it: slots in host memory for evicted pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sylvan.runtime.cache.types import ABSENT, Load, Locator, Node, Place, TierIds
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.tier import Layout, locator_in
from sylvan.runtime.features.tiers.work import HostPage, Save


@dataclass(slots=True, eq=False)
class HostTier:
    """Implements `Tier`, and queues its work for the worker half.

    Its contents do not survive the process, so it accepts KV of every namespace.

    Attributes:
        layout: Layout of the device's pages.
        slots: Slots of each group, in layout order.
        max_pending_bytes: Limit of bytes in flight to this tier; one node is always accepted.
        saves: Saves to send.
    """

    layout: Layout
    slots: tuple[int, ...]
    max_pending_bytes: int
    counts: TierCounts
    place: Place = Place.HOST
    whole_prefixes: bool = False
    is_open: bool = True
    saves: list[Save] = field(default_factory=list[Save])
    _free: list[list[int]] = field(init=False)
    _jobs: dict[int, int] = field(default_factory=dict[int, int])  # bytes
    _ended: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])

    def __post_init__(self) -> None:
        self._free = [[*range(count)][::-1] for count in self.slots]

    # ---- Tier

    @property
    def free_pages(self) -> int:
        return len(self._free[0])

    def wants(self, node: Node) -> bool:
        """Accept a node unless it exceeds all slots."""
        return len(node.tokens) // self.layout.page_size <= self.slots[0]

    def offer(self, number: int, node: Node, source: Place) -> Locator | None:
        locator = locator_in(node, source)
        count = len(node.tokens) // self.layout.page_size
        size = count * self.layout.page_bytes[0]
        if count > self.free_pages:
            return None
        if self._jobs and self.pending_bytes + size > self.max_pending_bytes:
            self.counts.host_refused_tokens += len(node.tokens)
            return None
        pages: list[HostPage] = []
        own = self._take(0, locator.pages, count, pages)
        groups = zip(self.layout.windows, locator.windows, strict=True)
        windows = tuple(self._take(group, each, count, pages) for group, each in groups)
        state = ABSENT
        if self.layout.state is not None and len(node.tokens) % self.layout.page_size == 0:
            states = np.array([locator.state], np.int64)
            state = int(self._take(self.layout.state, states, 1, pages)[0])
        self._jobs[number] = sum(self.layout.page_bytes[page.group] for page in pages)
        self.saves.append(Save(number, tuple(pages)))
        self.counts.host_offered_tokens += count * self.layout.page_size
        return Locator(own, windows, state)

    def poll(self) -> Iterable[tuple[int, bool]]:
        ended, self._ended = self._ended, []
        return ended

    def drop(self, locator: Locator) -> None:
        self._give(0, locator.pages.tolist())
        for group, pages in zip(self.layout.windows, locator.windows, strict=False):
            self._give(group, pages.tolist())
        if self.layout.state is not None:
            self._give(self.layout.state, [locator.state])

    # ---- reports of the worker half

    @property
    def pending_bytes(self) -> int:
        """Bytes in flight from the device."""
        return sum(self._jobs.values())

    @property
    def is_writing(self) -> bool:
        """Whether pages are in flight, or the tree must learn of arrived ones."""
        return bool(self._jobs or self._ended)

    @property
    def used_pages(self) -> int:
        """Used slots of the first group."""
        return self.slots[0] - self.free_pages

    def saved(self, number: int, *, ok: bool) -> None:
        """The worker half completed a save, or failed."""
        del self._jobs[number]
        self._ended.append((number, ok))

    def pages_of(self, load: Load) -> tuple[HostPage, ...]:
        """Return what a load reads from here."""
        found: list[HostPage] = []
        for part in load.pages:
            if part.place is self.place:
                group = self.layout.windows[part.group - 1] if part.group else 0
                each = zip(part.targets.tolist(), part.sources.tolist(), strict=True)
                found += [HostPage(group, target, slot) for target, slot in each]
        state = load.state
        if state is not None and state.place is self.place and self.layout.state is not None:
            found.append(HostPage(self.layout.state, state.target, state.source))
        return tuple(found)

    # ---- inside

    def _take(self, group: int, sources: TierIds, count: int, pages: list[HostPage]) -> TierIds:
        """Allocate slots for the first `count` pages, as far as there are free ones."""
        slots, free = np.full(len(sources), ABSENT, np.int64), self._free[group]
        for at, source in enumerate(sources[:count].tolist()):
            if source != ABSENT and free:
                slots[at] = slot = free.pop()
                pages.append(HostPage(group, source, slot))
        return slots

    def _give(self, group: int, slots: Sequence[int]) -> None:
        self._free[group] += [slot for slot in slots if slot != ABSENT]
