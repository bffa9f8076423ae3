"""Types and small array helpers shared by the cache package."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import EMPTY_IDS, IntArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Positions [start, stop) whose KV also depends on this digest: an image's, or a salt's."""

    start: int
    stop: int
    digest: bytes


TENANT = b"tenant:"
_FOREVER = 1 << 62


def tenant_span(start: int, salt: str) -> MediaSpan:
    """Return a span that isolates the positions from `start` on by a salt.

    Earlier positions, such as a public system prompt, stay shared with other tenants.
    """
    return MediaSpan(start, _FOREVER, TENANT + salt.encode())


@dataclass(slots=True, eq=False)  # not frozen: a frozen constructor takes three times as long
class CacheKey:
    """Identifies a prefix: equal keys have equal KV.

    `namespace` isolates KV that must never be shared: adapters, tenants, salts. The first three
    fields are immutable. The others speed up repeated lookups: `first` is the child key of the
    first page, `cursor` the node that the last lookup reached.
    """

    tokens: IntArray
    namespace: str = ""
    media: tuple[MediaSpan, ...] = ()
    first: bytes = b""
    cursor: MatchCursor | None = None


class Place(IntFlag):
    """Memories that may hold the KV of a node."""

    DEVICE = 1
    HOST = 2
    STORAGE = 4


TierIds = NDArray[np.int64]
ABSENT = -1
NO_TIER_IDS: TierIds = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Locator:
    """Where a tier stores the KV of a node, in numbers opaque to the cache.

    Attributes:
        pages: One number for each page of the node.
        windows: The same for each window group; `ABSENT` for missing pages.
        state: The recurrent state after the last token; `ABSENT` if missing.
    """

    pages: TierIds
    windows: tuple[TierIds, ...] = ()
    state: int = ABSENT

    def split_off(self, count: int) -> Locator:
        """Remove and return the first `count` pages."""
        upper = Locator(self.pages[:count], tuple(w[:count] for w in self.windows))
        self.pages = self.pages[count:]
        self.windows = tuple(w[count:] for w in self.windows)
        return upper

    def take_window(self, group: int, page: int) -> Locator:
        """Remove and return one page of a window group, which may be `ABSENT`."""
        taken = Locator(NO_TIER_IDS, tuple(w[:0] for w in self.windows))
        if self.windows:
            number = self.windows[group][page : page + 1].copy()
            taken.windows = (*taken.windows[:group], number, *taken.windows[group + 1 :])
            self.windows[group][page] = ABSENT
        return taken

    def take_state(self) -> Locator:
        """Remove and return the state, which may be `ABSENT`."""
        taken, self.state = Locator(NO_TIER_IDS, state=self.state), ABSENT
        return taken


@dataclass(slots=True, eq=False)
class Writing:
    """A running write of KV from `source` to `locator` in the tier `target`.

    Parts that the source overwrote meanwhile are discarded: all of them if the write is void,
    otherwise the parts in `lost`.
    """

    locator: Locator
    source: Place
    target: Place
    is_void: bool = False
    lost: list[Locator] = field(default_factory=list[Locator])


@dataclass(slots=True, eq=False)
class NodeParts:
    """Memory of a node beyond the device pages of the first group; most caches have none.

    Attributes:
        windows: For each window group the device page of each page of the node, or 0.
        state: Device slot of the recurrent state after the last token; 0 if there is none.
        lower: Locators of the node's KV in lower tiers.
        writing: Running writes to tiers, by number.
        readers: Loads in progress that read from `lower`.
        on_device: Children with pages on the device.
    """

    windows: list[IntArray] = field(default_factory=list[IntArray])
    state: int = 0
    lower: dict[Place, Locator] = field(default_factory=dict[Place, Locator])
    writing: dict[int, Writing] = field(default_factory=dict[int, Writing])
    readers: int = 0
    on_device: int = 0

    def writes_from(self, source: Place) -> Iterator[Writing]:
        """Running writes that read from `source`."""
        return (write for write in self.writing.values() if write.source is source)


NO_CHILDREN: dict[bytes, Node] = {}
"""Shared by leaves, which most nodes are; read only."""

NO_ORDER: list[bytes] = []
"""See `NO_CHILDREN`."""


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the prefix tree: `pages` hold the KV of `tokens`, or it lies in a lower tier.

    Only a leaf may end inside a page. `locks` counts the requests whose borrowed prefix ends at or
    below this node. `computed_at` is the step that computes the KV; its pages can be copied from
    only in later steps.
    """

    tokens: IntArray
    pages: IntArray  # device pages of the first group; empty if the KV is not on the device
    parent: Node | None
    start: int = 0  # position of the first token
    namespace: str = ""
    children: dict[bytes, Node] = field(default_factory=lambda: NO_CHILDREN)  # read only
    order: list[bytes] = field(default_factory=lambda: NO_ORDER)  # sorted child keys, if maintained
    media: tuple[MediaSpan, ...] = ()
    locks: int = 0
    last_used: int = 0  # logical clock; larger is more recent
    created: int = 0
    hits: int = 0
    priority: int = 0  # highest among the requests that used it
    computed_at: int = 0
    parts: NodeParts | None = None
    pushes: int = 0  # number of its last push onto the eviction heap
    queued: int = 0  # sequence number of its live heap entry; 0: not in the heap
    rank: tuple[int, ...] = ()  # at that push

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def places(self) -> Place:
        """The tiers that hold its KV."""
        found = Place.DEVICE if len(self.pages) else Place(0)
        for place in self.parts.lower if self.parts else ():
            found |= place
        return found

    def use(self, now: int, priority: int) -> None:
        """Mark as used by a request of that priority."""
        self.last_used = now
        self.hits += 1
        if priority > self.priority:  # noqa: PLR1730 (a call less for each node of a match)
            self.priority = priority

    def adopt(self, name: bytes, child: Node, *, ordered: bool) -> None:
        """Add a child; `ordered` must be the same in all calls for a node."""
        if self.children is NO_CHILDREN:
            self.children = {name: child}
            if ordered:
                self.order = [name]
        else:
            self.children[name] = child
            if ordered:
                insort(self.order, name)

    def disown(self, name: bytes) -> None:
        """Remove a child."""
        del self.children[name]
        if self.order:
            del self.order[bisect_left(self.order, name)]


def below(roots: Iterable[Node]) -> Iterator[Node]:
    """All nodes of trees except their roots, in any order."""
    stack = [child for root in roots for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


@dataclass(slots=True, eq=False)
class MatchCursor:
    """The last node within the first `limit` tokens of a key.

    It ends at position `stop`, where `next_page` is the child key. `found` is the result of the
    lookup at that `version` of the namespace.
    """

    node: Node
    stop: int
    next_page: bytes
    limit: int
    found: int = 0
    version: int = 0

    def is_valid(self, limit: int) -> bool:
        """Whether the node is still in the tree; nodes never leave before their descendants."""
        node = self.node
        in_tree = node.parent is not None and node.start + len(node.tokens) == self.stop
        return in_tree and limit == self.limit


@dataclass(slots=True, eq=False)
class RunningState:
    """The recurrent state of one request.

    `slot` holds the state after `at` tokens once all steps in flight are done; -1 before the first
    step. The first step starts at token `begun` from a copy of slot `source` (slot 0 is the initial
    state). `saves` are (tokens, slot) copies that the step being launched makes on the way.
    `checkpoint_at` is a prefix length shared with other prompts that has no saved state yet, worth
    saving; 0 if none.
    """

    slot: int
    begun: int
    source: int = 0
    at: int = -1
    checkpoint_at: int = 0
    saves: tuple[tuple[int, int], ...] = ()


class PageTable(Protocol):
    """Page numbers of one request in one KV group; entry i holds tokens of page i.

    The handle's page count bounds the valid entries. Entries before `first` are freed and never
    read.
    """

    pages: IntArray
    first: int


@dataclass(slots=True, eq=False)
class WindowTable:
    """The page table of a window group.

    `tail`, if not 0, is the page to copy the first tokens of the page after the shared ones from;
    see `KVHandle.tail`.
    """

    pages: IntArray
    first: int = 0
    tail: int = 0


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages of one KV group that are being loaded from one tier.

    `entries` are their page-table indices, `targets` the device pages, `sources` the tier's page
    numbers.
    """

    group: int
    place: Place
    entries: IntArray
    sources: TierIds
    targets: IntArray = field(default_factory=lambda: EMPTY_IDS)


@dataclass(frozen=True, slots=True)
class StateLoad:
    """A recurrent state being loaded into device slot `target`."""

    place: Place
    source: int
    target: int


@dataclass(slots=True, eq=False)
class Load:
    """A load from lower tiers for one request, up to the end of `node`, which it locks.

    `kv` is None after the request released its memory; the load then owns its targets until the
    transfer ends. `taken`: the transfer may have started.
    """

    number: int
    node: Node
    kv: KVHandle | None
    pages: tuple[PageLoad, ...] = ()
    state: StateLoad | None = None
    taken: bool = False


@dataclass(slots=True, eq=False)
class KVHandle:
    """KV memory of one request: page numbers in token order, one table for each paged KV group.

    The first `shared` entries of each table belong to the prefix tree, where `node` keeps them
    locked (or to `loading`); the rest up to `num_pages` belong to this handle alone. `cached`
    tokens were already computed on acquisition: whole shared pages and, if `tail` is set, the first
    tokens of the next page, which a step copies from that tree page.

    `pages` is a buffer that grows in place. Copies of a table stay valid while `version` is
    unchanged: page numbers are then only appended. `pages` belongs to the first group; for a model
    with window groups only, its numbers have no memory (`has_full` is False).
    """

    node: Node
    key: CacheKey
    pages: IntArray
    num_pages: int
    shared: int
    cached: int
    tail: tuple[int, int] | None = None  # (page, tokens)
    version: int = 0
    state: RunningState | None = None  # of models with recurrent layers
    first: int = 0
    windows: tuple[WindowTable, ...] = ()
    has_full: bool = True
    loading: Load | None = None  # a load that must finish before the request can run
    loaded: int = 0  # cached tokens that storage provided
    from_host: int = 0  # cached tokens that host memory provided
    rank: int = 0  # the group of ranks that has it, where groups have different requests

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """One page table per paged KV group, in group order."""
        if not self.windows:
            return (self,)
        return (self, *self.windows) if self.has_full else self.windows

    def view(self) -> IntArray:
        """Page numbers of the first table, oldest first."""
        return self.pages[: self.num_pages]


def overlapping(media: tuple[MediaSpan, ...], start: int, stop: int) -> tuple[MediaSpan, ...]:
    """The spans that cover any of the positions [start, stop)."""
    if not media:
        return media
    return tuple(s for s in media if s.start < stop and s.stop > start)


def digests(media: tuple[MediaSpan, ...], start: int, stop: int) -> bytes:
    """Digest of the media and salts at positions [start, stop).

    A span that starts inside also adds its offset, because equal tokens may diverge from there.
    """
    return b"".join(
        s.digest + b"@%d" % (s.start - start) if s.start > start else s.digest
        for s in overlapping(media, start, stop)
    )


def common_prefix_len(a: IntArray, b: IntArray) -> int:
    """Number of leading positions where `a` and `b` agree."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def media_divergence(
    a: tuple[MediaSpan, ...], b: tuple[MediaSpan, ...], start: int, stop: int
) -> int:
    """First position in [start, stop) at which the media of two keys differ."""
    differing = {s for s in set(a).symmetric_difference(b) if s.start < stop and s.stop > start}
    return max(start, min((s.start for s in differing), default=stop))
