"""From a batch of live requests to the step plan that crosses to the executor.

A plan is made when a batch is launched and copies what the step needs, so that the scheduler may
change its objects while the step runs, in this process or in another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.types import KVHandle
from sylvan.runtime.core.req import NO_GROWTH, Batch, Growth, Req, Slice
from sylvan.runtime.core.step import NO_PAGES, DraftRows, Join, StepPlan


@dataclass(slots=True, eq=False)
class _Occupant:
    """A request in a slot, and which of its pages the executor knows."""

    slot: int
    req: Req
    generates: bool
    kv: KVHandle | None = None
    kv_version: int = -1
    num_pages: int = 0


class PlanBuilder:
    """Assigns request slots and finds what changed since the last step.

    A rid keeps its slot until it is named in `Batch.ended` or comes back as another `Req`. Pages
    are sent again from the start when the handle is another one, or its version changed: that is
    what a preempted request looks like when it returns.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_rid: dict[str, _Occupant] = {}
        self._by_req: dict[Req, _Occupant] = {}
        self._decodes = _DecodeSteps()
        self._steps = 0

    def build(self, batch: Batch, work: dict[str, Any] | None = None) -> StepPlan:
        """Copy out what the step needs; `work` is that of capabilities.

        Raises:
            ExecutorError: more requests than slots.
        """
        self._steps += 1
        leaves = [slot for rid in batch.ended if (slot := self._leave(rid)) is not None]
        if batch.decodes and self._decodes.continues(batch.slices):
            return self._decodes.plan(batch, self._steps, leaves, work)
        joins: list[Join] = []
        pages = _PageChanges()
        layout = _Layout()
        count = self._add_decodes(batch, layout, pages) if batch.num_decodes else 0
        for piece in batch.slices[count:]:
            occupant = self._by_req.get(piece.req) or self._enter(piece.req, leaves, joins)
            pages.update(occupant)
            layout.add(piece, occupant)
        plain = batch.decodes and not layout.drafts
        self._decodes = _DecodeSteps(self._by_req, batch.slices) if plain else _DecodeSteps()
        return StepPlan(
            number=self._steps,
            num_slices=len(layout.slots),
            num_tokens=len(layout.ids),
            num_samples=len(layout.samples),
            num_in_flight=len(layout.rows),
            numbers=layout.numbers(),
            copies=batch.copies,
            leaves=leaves,
            joins=joins,
            pages=pages.packed(),
            token_types=layout.token_types(),
            sample_rows=layout.sample_rows(),
            drafts=tuple(layout.drafts),
            work=work or {},
        )

    def skip(self, steps: int) -> None:
        """So many steps were not built; see `skipping`."""
        self._steps += steps
        self.look_again()

    def look_again(self) -> None:
        """Some request did not get just the one token that its slot sampled last."""
        self._decodes = _DecodeSteps()

    def _add_decodes(self, batch: Batch, layout: _Layout, pages: _PageChanges) -> int:
        """Lay out the plain decodes together; returns how many slices that were."""
        pieces = batch.slices[: batch.num_decodes]
        occupants = [o for piece in pieces if (o := self._by_req.get(piece.req)) is not None]
        if len(occupants) < len(pieces):
            return 0
        layout.add_decodes(pieces, occupants, in_flight=batch.growth is None)
        if batch.growth is None:
            for occupant in occupants:
                pages.update(occupant)
        else:
            pages.grow([self._by_req[req] for req in batch.growth.reqs], batch.growth.pages)
        return len(pieces)

    def _enter(self, req: Req, leaves: list[int], joins: list[Join]) -> _Occupant:
        if (slot := self._leave(req.rid)) is not None:
            leaves.append(slot)
        if not self._free:
            leaves.append(self._evict())
        generates = isinstance(req.request, GenerateRequest)
        found = _Occupant(self._free.pop(), req, generates)
        self._by_rid[req.rid] = self._by_req[req] = found
        outputs = req.tokens.view(min(req.prompt_len, len(req.tokens)), len(req.tokens))
        joins.append(Join(found.slot, req.request, outputs.copy()))
        return found

    def _evict(self) -> int:
        """Free the slot of a request without memory: it waits, and joins anew when it returns."""
        for rid, occupant in self._by_rid.items():
            if occupant.req.kv is None:
                self._leave(rid)
                return occupant.slot
        raise ExecutorError("more requests run than there are request slots")

    def _leave(self, rid: str) -> int | None:
        occupant = self._by_rid.pop(rid, None)
        if occupant is None:
            return None
        del self._by_req[occupant.req]
        self._free.append(occupant.slot)
        return occupant.slot


class _DecodeSteps:
    """Plans steps in which the same requests decode as in the step before.

    Each of them got one token, whose id the executor has: it is the newest of its slot. So the
    numbers are those of the step before with all positions one further.
    """

    def __init__(
        self, occupants: Mapping[Req, _Occupant] | None = None, slices: Sequence[Slice] = ()
    ) -> None:
        """`slices`: of a step of decodes; empty if the last step was another kind."""
        self._slices = slices
        self._reqs = [piece.req for piece in slices]
        self._occupants = [occupants[req] for req in self._reqs] if occupants else []
        self._by_req = occupants or {}
        self._numbers: IntArray | None = None

    def continues(self, slices: Sequence[Slice]) -> bool:
        """Whether a step of decodes is of just the requests of the step before."""
        if not self._reqs:
            return False
        if slices is self._slices:
            return True
        return [s.req for s in slices] == self._reqs and not any(s.draft for s in slices)

    def plan(
        self, batch: Batch, number: int, leaves: list[int], work: dict[str, Any] | None
    ) -> StepPlan:
        """See `PlanBuilder.build`."""
        count = len(self._reqs)
        if self._numbers is None:
            slots = [occupant.slot for occupant in self._occupants]
            starts = np.array([piece.start for piece in batch.slices], np.int32)
            each = np.arange(count, dtype=np.int32)
            rows = (slots, starts, starts + 1, each, each, slots, np.zeros(count, np.int32))
            self._numbers = np.concatenate(rows, dtype=np.int32)
        else:  # steps in flight read the old ones
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
            pages=self._new_pages(batch.growth),
            work=work or {},
        )

    def _new_pages(self, growth: Growth | None) -> IntArray:
        if growth is NO_GROWTH:
            return NO_PAGES
        pages = _PageChanges()
        if growth is None:
            for occupant in self._occupants:
                pages.update(occupant)
        else:
            pages.grow([self._by_req[req] for req in growth.reqs], growth.pages)
        return pages.packed()


class _PageChanges:
    """Gathers the changes of page tables that the executor does not know yet."""

    def __init__(self) -> None:
        self._blocks: list[IntArray] = []

    def update(self, occupant: _Occupant) -> None:
        """Add what is new of the pages of a request."""
        kv, known = occupant.req.kv, occupant.num_pages
        assert kv is not None, "a slice of a request without memory"
        if kv is not occupant.kv or kv.version != occupant.kv_version:
            known = 0
        count = kv.num_pages
        if known == count:
            return
        occupant.kv, occupant.kv_version, occupant.num_pages = kv, kv.version, count
        for group, table in enumerate(kv.tables):
            block = np.empty((4, count - known), np.int32)
            block[0], block[1] = group, occupant.slot
            block[2] = np.arange(known, count)
            block[3] = table.pages[known:count]
            self._blocks.append(block)

    def grow(self, occupants: Sequence[_Occupant], pages: IntArray) -> None:
        """Add one page more of requests whose other pages are known; see `Growth`."""
        if not occupants:
            return
        block = np.empty((4, len(occupants)), np.int32)
        block[0] = 0
        block[1] = [occupant.slot for occupant in occupants]
        block[2] = [occupant.num_pages for occupant in occupants]
        block[3] = pages
        first = occupants[0].kv
        if first is not None and first.windows:
            for occupant in occupants:
                self.update(occupant)
            return
        for occupant in occupants:
            occupant.num_pages += 1
        self._blocks.append(block)

    def packed(self) -> IntArray:
        """See `StepPlan.pages`."""
        blocks = self._blocks
        if len(blocks) > 1:
            return np.concatenate(blocks, axis=1)
        return blocks[0] if blocks else NO_PAGES


class _Layout:
    """Gathers the numbers of a step, slice by slice."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.samples: list[int] = []
        self.rows: list[int] = []  # in flight
        self.sources: list[int] = []
        self.ids: list[int] = []
        self.drafts: list[DraftRows] = []
        self._sampled: list[int] = []  # rows, where there are guesses
        self._types: list[tuple[int, IntArray]] = []  # token types from a row on

    def add_decodes(
        self, pieces: Sequence[Slice], occupants: Sequence[_Occupant], *, in_flight: bool
    ) -> None:
        """Slices of plain decodes, which come first; some of their ids may be `in_flight`."""
        count = len(pieces)
        self.slots = [occupant.slot for occupant in occupants]
        self.starts = [piece.start for piece in pieces]
        self.stops = [start + 1 for start in self.starts]
        self.samples = list(range(count))
        self._sampled = list(range(count))
        tokens = [piece.req.tokens for piece in pieces]
        self.ids = [known.last for known in tokens]
        if in_flight:
            known_at = zip(tokens, self.stops, strict=True)
            self.rows = [row for row, (known, stop) in enumerate(known_at) if known.length < stop]
            self.sources = [self.slots[row] for row in self.rows]

    def add(self, piece: Slice, occupant: _Occupant) -> None:
        """The next slice."""
        tokens, start, stop = piece.req.tokens, piece.start, piece.stop
        index, row, known = len(self.slots), len(self.ids), tokens.length
        self.slots.append(occupant.slot)
        self.starts.append(start)
        self.stops.append(stop)
        if known == stop == start + 1:  # a decoding request whose newest token is known
            self.ids.append(tokens.last)
        else:
            self.ids.extend(tokens.view(start, min(stop, known)).tolist() if start < known else ())
            if known < stop:
                assert max(known, start) == stop - 1, "only the last token may be in flight"
                self.rows.append(len(self.ids))
                self.sources.append(occupant.slot)
                self.ids.append(0)
        if not occupant.generates:
            request = piece.req.request
            if isinstance(request, EmbedRequest) and request.token_types is not None:
                self._types.append((row, request.token_types[start:stop]))
        elif piece.samples:
            self.samples.append(index)
            newest = len(self.ids) - 1
            if piece.draft:
                self._add_draft(index, piece.draft.tokens, piece.draft.parents)
            self._sampled.extend(range(newest, len(self.ids)))

    def _add_draft(self, index: int, tokens: Sequence[int], parents: tuple[int, ...]) -> None:
        self.ids.extend(tokens)
        self.stops[index] += len(tokens)
        self.samples.extend([index] * len(tokens))
        self.drafts.append(DraftRows(index, parents))

    def sample_rows(self) -> IntArray | None:
        """See `StepPlan.sample_rows`."""
        return np.array(self._sampled, np.int32) if self.drafts else None

    def token_types(self) -> IntArray | None:
        """See `StepPlan.token_types`."""
        if not self._types:
            return None
        found = np.zeros(len(self.ids), np.int32)
        for row, part in self._types:
            found[row : row + len(part)] = part
        return found

    def numbers(self) -> IntArray:
        """See `StepPlan.numbers`."""
        lists = (self.slots, self.starts, self.stops, self.samples, self.rows, self.sources)
        packed = array("i")
        for numbers in (*lists, self.ids):
            packed.extend(numbers)
        return np.frombuffer(packed, np.int32)
