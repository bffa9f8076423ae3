"""Owns the KV pages of sliding-window layers.

A request holds the pages of its window and frees older ones. Tree nodes keep window pages until the
memory is needed. A hit of L tokens needs only the window before L, so pages that no hit at the end
of a node needs are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.audit import unowned
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.matching import MatchedPages, path_to
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.types import ABSENT, Node, NodeParts, Place, WindowTable


class WindowPages:
    """Owns the free pages of one window group, and those that tree nodes hold.

    A page is free, belongs to one node, or belongs to one request. Node pages count their readers
    (running requests); pages without readers are idle and may be taken at any time.
    """

    def __init__(self, group: KVGroup, index: int) -> None:
        """`index`: position among the window groups of the model."""
        self.group, self.index = group, index
        self.page_size = group.page_size
        self.allocator = PageAllocator(group.num_pages, group.page_size, group.first)
        self.num_cached = 0  # pages of nodes
        self._num_readers = 0  # sum of all counts
        numbers = group.first + group.num_pages
        self._readers = [0] * numbers
        self._owner: Any = np.empty(numbers, np.object_)  # node that has a page, or None
        self._entry = [0] * numbers  # index of a node's page in the node's whole prefix
        self._idle: OrderedDict[int, None] = OrderedDict()  # next page to take first

    @property
    def available_pages(self) -> int:
        """Number of pages available now."""
        return self.allocator.free_pages + len(self._idle)

    def make_free(self, count: int) -> bool:
        """Evict node pages until `count` are free, or no more can be evicted."""
        short = count - self.allocator.free_pages
        if short <= 0:
            return True
        if short > len(self._idle):
            return False
        pages = [self._idle.popitem(last=False)[0] for _ in range(short)]
        for page in pages:
            node: Node = self._owner[page]
            at = self._entry[page] - node.start // self.page_size
            _windows(node)[self.index][at] = 0
            for write in _parts(node).writes_from(Place.DEVICE):
                write.lost.append(write.locator.take_window(self.index, at))
        self._forget(np.array(pages, np.int32))
        return True

    # ---- requests

    def borrow(self, node: Node, table: WindowTable, num_pages: int, cached: int) -> None:
        """Fill the table of a request that continues after `cached` tokens.

        The first `num_pages` whole pages end at `node`. Entries that the tree lacks are 0.
        """
        table.pages = np.zeros(num_pages, np.int32)
        table.first = min(self.group.first_page(cached), num_pages)
        for owner, at, stop in self._spans(node, table.first, num_pages):
            offset = owner.start // self.page_size
            pages = _windows(owner)[self.index][at - offset : stop - offset]
            table.pages[at:stop] = pages
            self._add_reader(pages[pages != 0])

    def num_new(self, held: int, count: int, computed: int) -> int:
        """Number of pages that `extend` will take."""
        stop = held + count
        return stop - min(max(held, self.group.first_page(computed)), stop)

    def extend(self, table: WindowTable, held: int, count: int, computed: int) -> None:
        """Append `count` entries to `held` ones; entries before the window get no page.

        `num_new` pages must be free.
        """
        stop = held + count
        if stop > len(table.pages):
            room = np.empty(max(stop, 2 * len(table.pages), 8), np.int32)
            room[:held] = table.pages[:held]
            table.pages = room
        new = self.num_new(held, count, computed)
        table.pages[held : stop - new] = 0
        table.pages[stop - new : stop] = self.allocator.alloc(new)
        if new < count:
            table.first = stop - new

    def advance(self, table: WindowTable, shared: int, held: int, computed: int) -> None:
        """Free the pages that a request no longer reads once `computed` tokens are computed.

        The first `shared` of its `held` entries are pages of nodes.
        """
        first, stop = table.first, min(self.group.first_page(computed), held)
        if first >= stop:
            return
        middle = min(max(shared, first), stop)
        self._remove_reader(table.pages[first:middle])
        self.allocator.free(table.pages[middle:stop])
        table.pages[first:stop] = 0
        table.first = stop

    def publish(self, node: Node, table: WindowTable, shared: int, stop: int) -> bool:
        """Move entries [shared, stop) of a request to the nodes on the path to `node`.

        Where a node already has a page, the request switches to it. Returns whether any entry
        changed.
        """
        start = max(shared, table.first)
        changed = False
        for owner, at, end in self._spans(node, start, stop):
            kept, doubles = self._give(owner, at, table.pages[at:end])
            self._add_reader(kept)
            table.pages[at:end] = kept
            changed |= doubles
        return changed

    def fill(self, node: Node, entry: int, page: int, *, hold: bool) -> int:
        """Set entry `entry` of a node's prefix to `page`; return the page the node has afterwards.

        With `hold` a request becomes its reader.
        """
        kept, _ = self._give(node, entry, np.array([page], np.int32))
        if hold:
            self._add_reader(kept)
        return int(kept[0])

    def release(self, table: WindowTable, shared: int, held: int) -> None:
        """End a request; `shared` and `held` as in `advance`."""
        middle = min(max(shared, table.first), held)
        pages = table.pages[table.first : middle]
        self._remove_reader(pages[pages != 0])
        self.allocator.free(table.pages[max(middle, table.first) : held])
        table.first = held

    # ---- Component

    def on_split(self, upper: Node, lower: Node, num_pages: int) -> None:
        whole = _windows(lower)[self.index]
        moved = whole[:num_pages].copy()
        _windows(upper).append(moved)
        _windows(lower)[self.index] = whole[num_pages:].copy()
        self._owner[moved[moved != 0]] = upper

    def on_leave(self, node: Node, keep: int) -> None:
        kept = _windows(node)[self.index]
        gone = kept[keep:]
        gone = gone[gone != 0]
        kept[keep:] = 0
        for page in gone.tolist():
            del self._idle[page]  # an unlocked node has no readers
        self._forget(gone)

    def longest(self, path: Sequence[MatchedPages], limit: int, *, lower: bool) -> int:
        size, total = self.page_size, limit // self.page_size
        if not total:
            return 0
        there = self._present(path, lower=lower)[:total]
        pages = np.arange(total)
        last_missing = np.maximum.accumulate(np.where(there, -1, pages))
        first_read = np.maximum(0, (pages + 1) * size - self.group.window + 1) // size
        usable = np.flatnonzero(last_missing < first_read)
        return (int(usable[-1]) + 1) * size if len(usable) else 0

    def can_end(self, path: Sequence[MatchedPages], tail: Node, page: int, tokens: int) -> bool:
        if not _windows(tail)[self.index][page]:
            return False
        there = self._present(path, lower=False)
        return bool(there[self.group.first_page(tokens) :].all())

    # ---- audit

    def repair(self, borrowed: Sequence[IntArray], owned: Sequence[IntArray]) -> tuple[int, int]:
        """Check owners and reader counts against the requests, and fix differences.

        Returns how many pages had no owner, and how many had a wrong number of readers. Cheap
        unless the totals disagree.
        """
        held = sum(map(len, owned)) + self.num_cached + self.allocator.free_pages
        agree = sum(map(len, borrowed)) == self._num_readers
        if agree and held == self.allocator.num_pages:
            return 0, 0
        readers = np.zeros(len(self._readers), np.int32)
        for pages in borrowed:
            readers[pages] += 1
        wrong = int((readers != self._readers).sum())
        self._readers, self._num_readers = readers.tolist(), int(readers.sum())
        cached = np.array([node is not None for node in self._owner], np.bool_)
        for page in np.flatnonzero(cached).tolist():
            if readers[page]:
                self._idle.pop(page, None)
            else:
                self._idle.setdefault(page)
        lost = unowned(self.allocator.free_mask() | cached, owned)
        self.allocator.free(lost)
        return len(lost), wrong

    # ---- inside

    def _add_reader(self, pages: IntArray) -> None:
        """Register a request as reader of these node pages."""
        readers, idle = self._readers, self._idle
        for page in pages.tolist():
            if not readers[page]:
                del idle[page]
            readers[page] += 1
        self._num_readers += len(pages)

    def _remove_reader(self, pages: IntArray) -> None:
        """Undo `_add_reader`."""
        readers, idle = self._readers, self._idle
        for page in pages.tolist():
            readers[page] -= 1
            if readers[page]:
                continue
            idle[page] = None
            node: Node = self._owner[page]
            if self._entry[page] < self.group.first_page(node.stop):
                idle.move_to_end(page, last=False)  # no hit at the end of the node needs it
        self._num_readers -= len(pages)

    def _give(self, node: Node, entry: int, pages: IntArray) -> tuple[IntArray, bool]:
        """Give `node` the `pages` it lacks, from entry `entry` of its prefix on.

        Returns its pages there afterwards, and whether it had any before.
        """
        at = entry - node.start // self.page_size
        kept = _windows(node)[self.index][at : at + len(pages)]
        lacking = kept == 0
        taken, doubles = pages[lacking], pages[~lacking]
        kept[lacking] = taken
        self._owner[taken] = node
        for page, number in zip(taken.tolist(), np.flatnonzero(lacking).tolist(), strict=True):
            self._entry[page] = entry + number
            self._idle[page] = None
        self.num_cached += len(taken)
        self.allocator.free(doubles)
        return kept, len(doubles) > 0

    def _forget(self, pages: IntArray) -> None:
        self._owner[pages] = None
        self.num_cached -= len(pages)
        self.allocator.free(pages)

    def _spans(self, node: Node, start: int, stop: int) -> Iterator[tuple[Node, int, int]]:
        """Nodes on the path to `node` that cover any of entries [start, stop), and which ones."""
        for owner in path_to(node):
            end = min(stop, -(-owner.stop // self.page_size))
            if end <= start:
                return
            offset = owner.start // self.page_size
            if offset < end:
                yield owner, max(start, offset), end

    def _present(self, path: Sequence[MatchedPages], *, lower: bool) -> NDArray[np.bool_]:
        """Which pages of a path are present."""
        found: list[NDArray[np.bool_]] = [np.empty(0, np.bool_)]
        for node, count in path:
            there = _windows(node)[self.index][:count] != 0
            for locator in _parts(node).lower.values() if lower else ():
                if locator.windows:
                    there |= locator.windows[self.index][:count] != ABSENT
            found.append(there)
        return np.concatenate(found)


def fullest(windows: Sequence[WindowPages]) -> tuple[int, int]:
    """Tokens that requests hold in the fullest window group, and its total; 0, 0 without one."""
    if not windows:
        return 0, 0
    found = max(windows, key=lambda w: 1 - w.available_pages / w.allocator.num_pages)
    pages, size = found.allocator.num_pages, found.page_size
    return (pages - found.available_pages) * size, pages * size


def _parts(node: Node) -> NodeParts:
    assert node.parts is not None, "nodes of a model with windows have parts"
    return node.parts


def _windows(node: Node) -> list[IntArray]:
    return _parts(node).windows
