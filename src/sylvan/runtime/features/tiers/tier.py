"""The store tier as the prefix tree sees it: page numbers, and the names behind them.

What the tree drops stays in the store, and is found again by name. Writing takes two steps: a page
is copied to host memory, and written to the store once the copy is known to be valid. Pages that
are evicted during the copy are copied before the step that may overwrite them (`take_urgent`).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sylvan.protocol.tiers import WritePolicy
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.matching import path_to
from sylvan.runtime.cache.types import ABSENT, CacheKey, Locator, Node, Place, TierIds
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.keys import STATE, PageNames, sibling, window_kind
from sylvan.runtime.features.tiers.work import Commit, Export, Page

WRITE_BACK_SHARE = 8
"""With write_back, one in this many device pages is written before its eviction."""

_ADAPTER_ID = re.compile(r"@[0-9a-f]{16}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Pages of a model's groups, in the order of `ExecutorCaps.kv_groups`, and their sizes.

    Each of several `ranks` has as many bytes of a page.
    """

    groups: tuple[KVGroup, ...]
    page_bytes: tuple[int, ...]
    ranks: int = 1

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.groups[0].page_size

    @property
    def windows(self) -> tuple[int, ...]:
        """Which groups have a window."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind == "window")

    @property
    def state(self) -> int | None:
        """Which group holds recurrent states."""
        return next((i for i, group in enumerate(self.groups) if group.kind == "state"), None)


@dataclass(slots=True, eq=False)
class _Write:
    """A write that the tree started."""

    numbers: dict[str, int]  # by name, while being copied
    num_bytes: int
    ended: bool = False  # of the copy
    reported: bool = False  # for the tree
    may_be_saved: bool = True  # all of it, if its pages are reused now
    is_saved: bool = False  # copied before its pages were reused: useful even without the tree


@dataclass(slots=True, eq=False)
class StorageTier:
    """Implements `Tier`, and queues its work for the worker half.

    Attributes:
        layout: Layout of the device's pages.
        max_known: Largest number of stored pages and states that the tree tracks.
        max_pending_bytes: Limit of bytes in flight to the store; one node is always accepted.
        exports, commits: Work to send.
        known: Names of the stored pages and states that the tree tracks, by number.
    """

    layout: Layout
    max_known: int
    max_pending_bytes: int
    counts: TierCounts
    place: Place = Place.STORAGE
    whole_prefixes: bool = True
    exports: list[Export] = field(default_factory=list[Export])
    commits: list[Commit] = field(default_factory=list[Commit])
    pending_bytes: int = 0
    known: dict[int, str] = field(default_factory=dict[int, str])
    _naming: PageNames | None = None
    _free: list[int] = field(default_factory=list[int])
    _stored: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    _jobs: dict[int, _Write] = field(default_factory=dict[int, _Write])
    _committed: dict[int, int] = field(default_factory=dict[int, int])  # bytes, by job
    _ended: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])

    # ---- Tier

    @property
    def free_pages(self) -> int:
        return self.max_known - len(self.known) if self._naming is not None else 0

    def wants(self, node: Node) -> bool:
        prefix = node.stop // self.layout.page_size * len(self.layout.groups)
        return may_be_stored(node.namespace) and prefix <= self.max_known

    def offer(self, number: int, node: Node, source: Place) -> Locator | None:
        """See `Tier.offer`; for a `source` in host memory, numbers are slots of the host tier."""
        naming, count = self._naming, len(node.tokens) // self.layout.page_size
        if naming is None or count > self.free_pages:
            return None
        names = self._names_of_node(node, naming, count)
        copied = locator_in(node, source)
        wanted = self._wanted(copied, names)
        size = sum(self.layout.page_bytes[page.group] for page in wanted)
        if self.pending_bytes and self.pending_bytes + size > self.max_pending_bytes:
            self.counts.refused_tokens += len(node.tokens)
            return None
        locator = self._locate(copied, names)
        self.counts.offered_tokens += count * self.layout.page_size
        if not wanted:
            self._ended.append((number, True))
            return locator
        at = {name: n for n in _numbers(locator) if (name := self.known[n]) not in self._stored}
        self._jobs[number] = _Write(at, size, may_be_saved=source is Place.DEVICE)
        self.pending_bytes += size
        self.exports.append(Export(number, tuple(wanted), source is Place.HOST))
        return locator

    def poll(self) -> Iterable[tuple[int, bool]]:
        """Return finished writes; the tree has dropped the void ones among earlier reports."""
        for number, job in [*self._jobs.items()]:
            if job.reported:
                self._commit(number, job)
        ended, self._ended = self._ended, []
        for number, _ in ended:
            if (job := self._jobs.get(number)) is not None:
                job.reported = True
        return ended

    def drop(self, locator: Locator) -> None:
        for number in _numbers(locator):
            del self.known[number]
            self._free.append(number)

    # ---- reports of the worker half

    @property
    def is_open(self) -> bool:
        """Whether a store is attached."""
        return self._naming is not None

    @property
    def writing(self) -> frozenset[int]:
        """Jobs whose pages are not in the store yet."""
        return frozenset((*self._jobs, *self._committed))

    def open(self, naming: PageNames) -> None:
        """Start using a store, with these page names."""
        self._naming = naming
        self._stored.clear()

    def close(self) -> None:
        """Stop using the store; what was not committed is lost."""
        self._naming = None
        self._stored.clear()
        self.exports.clear()
        for number, job in self._jobs.items():
            self.exported(number, ok=False)
            job.numbers = {}

    def name(self, number: int) -> str:
        """Return the name of a page that the tree tracks."""
        return self.known[number]

    def names(self, key: CacheKey, first: int, stop: int) -> Sequence[str]:
        """Return names of pages [first, stop) of a prefix in the first group; needs a store."""
        assert self._naming is not None
        return self._naming.names(key, first, stop)

    def take(self, name: str) -> int:
        """Allocate a number for a stored page."""
        self._note_stored(name)
        return self._number(name)

    def take_urgent(self, was_evicted: Callable[[int], bool]) -> tuple[int, ...]:
        """Return jobs whose device pages were evicted since the last call; to send with this step.

        Nothing writes to such pages before this step. Copied by then, they reach the store although
        the tree has dropped them.

        Args:
            was_evicted: Returns whether device pages of a job were evicted.
        """
        found: list[int] = []
        for number, job in self._jobs.items():
            if job.may_be_saved and was_evicted(number):
                job.is_saved, job.may_be_saved = True, False
                if not job.ended:
                    found.append(number)
        return tuple(found)

    def exported(self, number: int, *, ok: bool) -> None:
        """The worker half copied an export to host memory, or failed."""
        job = self._jobs.get(number)
        if job is not None and not job.ended:
            job.ended = True
            if not ok:
                job.is_saved = job.may_be_saved = False
            self._ended.append((number, ok))

    def persisted(self, number: int, lost: Sequence[str]) -> None:
        """Committed pages are in the store, except `lost`."""
        self.pending_bytes -= self._committed.pop(number, 0)
        for name in lost:
            self._stored.pop(name, None)

    # ---- inside

    def _commit(self, number: int, job: _Write) -> None:
        """Commit the part of a job that the tree kept, or all of it."""
        del self._jobs[number]
        kept = (name for name, n in job.numbers.items() if self.known.get(n) == name)
        names = [*(job.numbers if job.is_saved else kept)]
        for name in names:
            self._note_stored(name)
        self.commits.append(Commit(number, tuple(names)))
        if names:
            self._committed[number] = job.num_bytes
        else:
            self.pending_bytes -= job.num_bytes

    def _names_of_node(self, node: Node, naming: PageNames, count: int) -> Sequence[str]:
        """Return the names of a node's whole pages."""
        path = [*path_to(node)][::-1]
        tokens = np.concatenate([each.tokens for each in path])
        media = tuple({span: None for each in path for span in each.media})
        first = node.start // self.layout.page_size
        key = CacheKey(tokens, node.namespace, media)
        return naming.names(key, first, first + count, self._name_before(node))

    def _name_before(self, node: Node) -> str:
        """Return the name of the page before a node, if it was computed before."""
        above = node.parent
        if above is None or above.parts is None:
            return ""
        known = [write.locator for write in above.parts.writing.values()]
        if (lower := above.parts.lower.get(self.place)) is not None:
            known.append(lower)
        numbers = [int(locator.pages[-1]) for locator in known if len(locator.pages)]
        return next((self.known[n] for n in numbers if n in self.known), "")

    def _wanted(self, locator: Locator, names: Sequence[str]) -> list[Page]:
        """Return the pages and states of a node that the store does not have."""
        layout = self.layout
        each = zip(locator.pages.tolist(), names, strict=False)
        found = [Page(0, page, name) for page, name in each]
        for index, group in enumerate(layout.windows):
            found += [
                Page(group, page, sibling(name, window_kind(index)))
                for page, name in zip(locator.windows[index].tolist(), names, strict=False)
                if page != ABSENT
            ]
        if self._has_state(locator, names) and layout.state is not None:
            found.append(Page(layout.state, locator.state, sibling(names[-1], STATE)))
        return [page for page in found if page.name not in self._stored]

    def _locate(self, locator: Locator, names: Sequence[str]) -> Locator:
        pages = np.full(len(locator.pages), ABSENT, np.int64)
        pages[: len(names)] = [self._number(name) for name in names]
        windows: list[TierIds] = []
        for index, own in enumerate(locator.windows):
            numbers = np.full(len(locator.pages), ABSENT, np.int64)
            for at, name in enumerate(names):
                if own[at] != ABSENT:
                    numbers[at] = self._number(sibling(name, window_kind(index)))
            windows.append(numbers)
        state = ABSENT
        if self._has_state(locator, names):
            state = self._number(sibling(names[-1], STATE))
        return Locator(pages, tuple(windows), state)

    def _has_state(self, locator: Locator, names: Sequence[str]) -> bool:
        """Whether a recurrent state can be stored; not after an incomplete last page."""
        return locator.state != ABSENT and len(names) == len(locator.pages)

    def _number(self, name: str) -> int:
        number = self._free.pop() if self._free else len(self.known)
        self.known[number] = name
        return number

    def _note_stored(self, name: str) -> None:
        self._stored[name] = None
        self._stored.move_to_end(name)
        if len(self._stored) > self.max_known:
            self._stored.popitem(last=False)


def locator_in(node: Node, place: Place) -> Locator:
    """Return where a node is in one tier; on the device, page numbers and a slot."""
    parts = node.parts
    assert parts is not None
    if place is not Place.DEVICE:
        return parts.lower[place]
    windows = tuple(np.where(own == 0, ABSENT, own).astype(np.int64) for own in parts.windows)
    return Locator(node.pages.astype(np.int64), windows, parts.state or ABSENT)


def write_ahead_pages(policy: WritePolicy, num_pages: int) -> int:
    """Return how many device pages next in eviction order should also be in the store."""
    match policy:
        case "write_through":
            return num_pages
        case "write_through_selective":
            return 0
        case "write_back":
            return max(1, num_pages // WRITE_BACK_SHARE)


def may_be_stored(namespace: str) -> bool:
    """Whether KV of a namespace is valid in other processes.

    An adapter's ID ends in a digest of its contents. Texts to embed are not stored.
    """
    kind = namespace.partition(":")[0]
    return not kind or _ADAPTER_ID.search(kind) is not None


def _numbers(locator: Locator) -> list[int]:
    """Return all numbers in a locator."""
    every = [*locator.pages.tolist(), locator.state]
    for pages in locator.windows:
        every += pages.tolist()
    return [number for number in every if number != ABSENT]
