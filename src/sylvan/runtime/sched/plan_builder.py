"""Converts a batch of requests to a step plan for the executor.

A plan copies what the step needs, so that the scheduler may change its objects while the step runs,
in this process or another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.cache.types import KVHandle
from sylvan.runtime.core.req import NO_GROWTH, Batch, Growth, Req, Slice
from sylvan.runtime.core.step import NO_PAGES, DraftRows, Join, StepPlan


class PlanBuilder:
    """Assigns request slots and computes what changed since the last step.

    A rid keeps its slot until `Batch.ended` names it or another `Req` uses it. All pages are sent
    again when the handle or its version has changed, as after preemption.
    """

    def __init__(self, num_slots: int, *, resolves: bool = True) -> None:
        """`resolves`: the executor knows the newest token of each slot."""
        self._resolves = resolves
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_rid: dict[str, Req] = {}  # requests with a slot
        self._tables = _PageTables(num_slots)
        self._decodes = _DecodeSteps()
        self._steps = 0

    def build(self, batch: Batch, work: dict[str, Any] | None = None) -> StepPlan:
        """Build the plan; `work` holds the entries of capabilities.

        Raises:
            ExecutorError: more requests than slots.
        """
        self._steps += 1
        leaves = [slot for rid in batch.ended if (slot := self._leave(rid)) is not None]
        if batch.decodes and self._decodes.continues(batch.slices):
            pages = self._tables.changes(batch.slices, batch.growth)
            return self._decodes.plan(batch, self._steps, leaves, pages, work)
        joins: list[Join] = []
        layout = _Layout()
        decodes = batch.slices[: batch.num_decodes]
        slots = [piece.req.slot for piece in decodes]
        if slots and min(slots) < 0:
            decodes = ()  # a request joins again
        blocks = self._add_decodes(decodes, slots, layout, batch.growth) if decodes else []
        for piece in batch.slices[len(decodes) :]:
            req = piece.req
            if req.slot < 0:
                self._enter(req, leaves, joins)
            self._tables.update(req, blocks)
            layout.add(piece)
        plain = batch.decodes and not layout.drafts and self._resolves
        self._decodes = _DecodeSteps(batch.slices) if plain else _DecodeSteps()
        return StepPlan(
            number=self._steps,
            num_slices=layout.num_slices,
            num_tokens=layout.num_tokens,
            num_samples=layout.num_samples,
            num_in_flight=layout.num_in_flight,
            numbers=layout.numbers(),
            copies=batch.copies,
            leaves=leaves,
            joins=joins,
            pages=_packed(blocks),
            token_types=layout.token_types(),
            sample_rows=layout.sample_rows(),
            drafts=tuple(layout.drafts),
            work=work or {},
        )

    def skip(self, steps: int) -> None:
        """Account for `steps` steps that were not built; see `skipping`."""
        self._steps += steps
        self.reset_decodes()

    def reset_decodes(self) -> None:
        """Leave the fast path: a request received other tokens than its slot's last sample."""
        self._decodes = _DecodeSteps()

    def _add_decodes(
        self,
        pieces: Sequence[Slice],
        slots: Sequence[int],
        layout: _Layout,
        growth: Growth | None,
    ) -> list[IntArray]:
        """Lay out plain decodes together; return the changes of their page tables."""
        layout.add_decodes(pieces, np.array(slots, np.int32), in_flight=growth is None)
        changes = self._tables.changes(pieces, growth)
        return [changes] if changes is not NO_PAGES else []

    def _enter(self, req: Req, leaves: list[int], joins: list[Join]) -> None:
        if (slot := self._leave(req.rid)) is not None:
            leaves.append(slot)
        if not self._free:
            leaves.append(self._evict())
        req.slot = slot = self._free.pop()
        self._by_rid[req.rid] = req
        self._tables.clear(slot)
        outputs = req.tokens.view(min(req.prompt_len, len(req.tokens)), len(req.tokens))
        joins.append(Join(slot, req.request, outputs.copy()))

    def _evict(self) -> int:
        """Free the slot of a request without memory, which joins again when it returns."""
        for rid, req in self._by_rid.items():
            if req.kv is None:
                slot = self._leave(rid)
                assert slot is not None
                return slot
        raise ExecutorError("there are more running requests than request slots")

    def _leave(self, rid: str) -> int | None:
        req = self._by_rid.pop(rid, None)
        if req is None:
            return None
        slot, req.slot = req.slot, -1
        self._free.append(slot)
        return slot


class _DecodeSteps:
    """Fast path for steps that decode the same requests as the step before.

    Each request got one token, and its id is still on the device, so the plan is the previous one
    with all positions advanced by one.
    """

    def __init__(self, slices: Sequence[Slice] = ()) -> None:
        """`slices`: slices of a decode-only step; empty after other steps."""
        self._slices = slices
        self._numbers: IntArray | None = None

    def continues(self, slices: Sequence[Slice]) -> bool:
        """Whether a decode step has the same requests as the step before."""
        before = self._slices
        if slices is before:
            return bool(slices)
        if len(before) != len(slices) or not before:
            return False
        same = all(a.req is b.req for a, b in zip(before, slices, strict=True))
        return same and not any(piece.draft for piece in slices)

    def plan(
        self,
        batch: Batch,
        number: int,
        leaves: list[int],
        pages: IntArray,
        work: dict[str, Any] | None,
    ) -> StepPlan:
        """`pages` are `StepPlan.pages`."""
        count = len(batch.slices)
        if self._numbers is None:
            slots = [piece.req.slot for piece in batch.slices]
            starts = np.array([piece.start for piece in batch.slices], np.int32)
            each = np.arange(count, dtype=np.int32)
            rows = (slots, starts, starts + 1, each, each, slots, np.zeros(count, np.int32))
            self._numbers = np.concatenate(rows, dtype=np.int32)
        else:  # steps in flight read the old arrays
            self._numbers = self._numbers.copy()
            self._numbers[count : 3 * count] += 1
        self._slices = batch.slices
        return StepPlan(
            number=number,
            num_slices=count,
            num_tokens=count,
            num_samples=count,
            num_in_flight=count,
            numbers=self._numbers,
            copies=batch.copies,
            leaves=leaves,
            pages=pages,
            work=work or {},
        )


class _PageTables:
    """Tracks which pages the executor knows for each slot."""

    def __init__(self, num_slots: int) -> None:
        self._handles: list[KVHandle | None] = [None] * num_slots
        self._versions = [-1] * num_slots
        self._counts: IntArray = np.zeros(num_slots, np.int32)
        self._count = self._counts.data  # reads single numbers in half the time

    def clear(self, slot: int) -> None:
        """Forget the pages of `slot`; another request uses it."""
        self._handles[slot] = None

    def changes(self, pieces: Sequence[Slice], growth: Growth | None) -> IntArray:
        """Page updates of plain decodes; `growth` gives them if known."""
        if growth is NO_GROWTH:
            return NO_PAGES
        blocks: list[IntArray] = []
        if growth is None:
            for piece in pieces:
                self.update(piece.req, blocks)
        elif growth.reqs:
            first = growth.reqs[0].kv
            if first is None or not first.windows:
                return self._grow(growth)
            for req in growth.reqs:
                self.update(req, blocks)
        return _packed(blocks)

    def update(self, req: Req, blocks: list[IntArray]) -> None:
        """Add the page updates of one request."""
        kv, slot = req.kv, req.slot
        assert kv is not None, "a slice of a request without memory"
        known, count = self._count[slot], kv.num_pages
        if kv is not self._handles[slot] or kv.version != self._versions[slot]:
            self._handles[slot], self._versions[slot] = kv, kv.version
            known = 0
        if known == count:
            return
        self._count[slot] = count
        for group, table in enumerate(kv.tables):
            block = np.empty((4, count - known), np.int32)
            block[0], block[1] = group, slot
            block[2] = np.arange(known, count)
            block[3] = table.pages[known:count]
            blocks.append(block)

    def _grow(self, growth: Growth) -> IntArray:
        """Add the one new page of each request that grew; see `Growth`."""
        slots = np.array([req.slot for req in growth.reqs], np.int32)
        block = np.empty((4, len(slots)), np.int32)
        block[0], block[1], block[3] = 0, slots, growth.pages
        block[2] = self._counts[slots]
        self._counts[slots] += 1
        return block


def _packed(blocks: Sequence[IntArray]) -> IntArray:
    if len(blocks) > 1:
        return np.concatenate(blocks, axis=1)
    return blocks[0] if blocks else NO_PAGES


class _Layout:
    """Collects the arrays of a step: plain decodes at once, then other slices one by one."""

    def __init__(self) -> None:
        self.drafts: list[DraftRows] = []
        self._decodes: tuple[IntArray, ...] = ()  # arrays of the plain decodes, which come first
        self._count = 0  # number of plain decodes
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._samples: list[int] = []
        self._rows: list[int] = []  # rows in flight
        self._sources: list[int] = []
        self._ids: list[int] = []
        self._sampled: list[int] = []  # sampled rows, if there are draft tokens
        self._types: list[tuple[int, IntArray]] = []  # token types from a row on

    @property
    def num_slices(self) -> int:
        """Number of slices laid out so far."""
        return self._count + len(self._slots)

    @property
    def num_tokens(self) -> int:
        return self._count + len(self._ids)

    @property
    def num_samples(self) -> int:
        return self._count + len(self._samples)

    @property
    def num_in_flight(self) -> int:
        return (len(self._decodes[4]) if self._decodes else 0) + len(self._rows)

    def add_decodes(self, pieces: Sequence[Slice], slots: IntArray, *, in_flight: bool) -> None:
        """Add plain decodes, which come first; `in_flight` marks ids still on the device."""
        self._count = count = len(pieces)
        starts = np.array([piece.start for piece in pieces], np.int32)
        stops, each = starts + 1, np.arange(count, dtype=np.int32)
        tokens = [piece.req.tokens for piece in pieces]
        ids = np.array([known.last for known in tokens], np.int32)
        rows = each[:0]
        if in_flight:
            rows = each[np.array([known.length for known in tokens]) < stops]
        self._decodes = (slots, starts, stops, each, rows, slots[rows], ids)

    def add(self, piece: Slice) -> None:
        """Add a slice."""
        req, start, stop = piece.req, piece.start, piece.stop
        tokens, slot = req.tokens, req.slot
        index, row, known = self.num_slices, self.num_tokens, tokens.length
        self._slots.append(slot)
        self._starts.append(start)
        self._stops.append(stop)
        if known == stop == start + 1:  # a decode whose input token is known on the host
            self._ids.append(tokens.last)
        else:
            self._ids.extend(tokens.view(start, min(stop, known)).tolist() if start < known else ())
            if known < stop:
                assert max(known, start) == stop - 1, "only the last token may be in flight"
                self._rows.append(self.num_tokens)
                self._sources.append(slot)
                self._ids.append(0)
        if not req.generates:
            request = req.request
            if isinstance(request, EmbedRequest) and request.token_types is not None:
                self._types.append((row, request.token_types[start:stop]))
        elif piece.samples:
            self._samples.append(index)
            newest = self.num_tokens - 1
            if piece.draft:
                self._add_draft(index, piece.draft.tokens, piece.draft.parents)
            self._sampled.extend(range(newest, self.num_tokens))

    def _add_draft(self, index: int, tokens: Sequence[int], parents: tuple[int, ...]) -> None:
        self._ids.extend(tokens)
        self._stops[-1] += len(tokens)
        self._samples.extend([index] * len(tokens))
        self.drafts.append(DraftRows(index, parents))

    def sample_rows(self) -> IntArray | None:
        if not self.drafts:
            return None
        return np.array([*range(self._count), *self._sampled], np.int32)

    def token_types(self) -> IntArray | None:
        if not self._types:
            return None
        found = np.zeros(self.num_tokens, np.int32)
        for row, part in self._types:
            found[row : row + len(part)] = part
        return found

    def numbers(self) -> IntArray:
        lists = (
            self._slots,
            self._starts,
            self._stops,
            self._samples,
            self._rows,
            self._sources,
            self._ids,
        )
        if self._decodes and not self._slots:
            return np.concatenate(self._decodes)
        if self._decodes:
            sizes = [len(part) + len(rest) for part, rest in zip(self._decodes, lists, strict=True)]
            found, at = np.empty(sum(sizes), np.int32), 0
            for part, rest, size in zip(self._decodes, lists, sizes, strict=True):
                found[at : at + len(part)] = part
                if rest:
                    found[at + len(part) : at + size] = rest
                at += size
            return found
        packed = array("i")
        for numbers in lists:
            packed.extend(numbers)
        return np.frombuffer(packed, np.int32)
