"""One step's inputs, copied out of the scheduler's objects while it stands still.

A plan is made in the scheduler's thread, when a batch is launched. Executing it touches nothing
of the scheduler, so that the next step can be planned meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.types import KVHandle
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.states import StateWork


@dataclass(frozen=True, slots=True)
class Join:
    """A request enters a slot, having generated `outputs` already."""

    slot: int
    request: GenerateRequest
    outputs: IntArray


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Row `slot` of the page table reads `pages` from entry `start` on."""

    slot: int
    start: int
    pages: IntArray


@dataclass(frozen=True, slots=True)
class PromptWant:
    """Prompt log probabilities that slice `index` brings: of `token_ids`, by `rows` of the step."""

    index: int
    rows: IntArray
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class EmbedWork:
    """Slice `index` computes tokens of an EmbedRequest from `start` on; `done`: to its last."""

    index: int
    start: int
    done: bool
    dimensions: int | None
    normalize: bool


@dataclass(slots=True)
class StepPlan:
    """Everything a step needs: T rows, R slices of which S sample, F rows whose id is not known.

    `numbers` holds, one after another: request slot, first and past-the-last position of each
    slice (3, R); indices of slices that sample (S,); rows in flight and the slots whose newest
    token they are (2, F); ids (T,).
    """

    num_slices: int
    num_tokens: int
    num_samples: int
    num_in_flight: int
    numbers: IntArray
    copies: tuple[tuple[int, int, int], ...] = ()
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    prompt: list[PromptWant] = field(default_factory=list)
    embeds: Sequence[EmbedWork] = ()  # slices of EmbedRequests that are complete
    token_types: IntArray | None = None  # (T,); None: all 0
    states: StateWork | None = None  # of models with recurrent layers

    @property
    def slots(self) -> IntArray:
        """Request slots, (R,)."""
        return self.numbers[: self.num_slices]

    @property
    def starts(self) -> IntArray:
        """First positions, (R,)."""
        return self.numbers[self.num_slices : 2 * self.num_slices]

    @property
    def stops(self) -> IntArray:
        """Positions after the last, (R,)."""
        return self.numbers[2 * self.num_slices : 3 * self.num_slices]

    @property
    def samples(self) -> IntArray:
        """Indices of slices that sample, (S,)."""
        return self.numbers[3 * self.num_slices :][: self.num_samples]

    @property
    def sample_slots(self) -> IntArray:
        """Request slots of slices that sample, (S,)."""
        return self.slots if self.num_samples == self.num_slices else self.slots[self.samples]

    @property
    def sample_positions(self) -> NDArray[np.int64]:
        """Of the tokens that are sampled, (S,)."""
        return self.stops[self.samples].astype(np.int64)

    @property
    def in_flight(self) -> IntArray:
        """Rows whose id the step before samples, (F,)."""
        return self.numbers[3 * self.num_slices + self.num_samples :][: self.num_in_flight]

    @property
    def in_flight_slots(self) -> IntArray:
        """Slots whose newest token those are, (F,)."""
        return self.numbers[-self.num_tokens - self.num_in_flight :][: self.num_in_flight]

    @property
    def input_ids(self) -> IntArray:
        """Ids, (T,); of rows in flight they mean nothing."""
        return self.numbers[len(self.numbers) - self.num_tokens :]


@dataclass(slots=True, eq=False)
class _Occupant:
    """What has been told about the request in a slot."""

    slot: int
    req: Req
    generates: bool
    kv: KVHandle | None = None
    kv_version: int = -1
    num_pages: int = 0

    def knows(self, kv: KVHandle) -> bool:
        """Whether all pages of `kv` have been told."""
        return kv is self.kv and kv.version == self.kv_version and kv.num_pages == self.num_pages


class Planner:
    """Assigns request slots and finds what changed since the last step.

    A rid keeps its slot until it is named in `Batch.ended` or comes back as another `Req`. Pages
    are told again from the start when the handle is another one, or its version changed: that is
    what a preempted request looks like when it returns.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_rid: dict[str, _Occupant] = {}
        self._by_req: dict[Req, _Occupant] = {}
        self._decoding = _Decoding()

    def plan(self, batch: Batch) -> StepPlan:
        """Copy out what the step needs.

        Raises:
            ExecutorError: more requests than slots.
        """
        leaves = [slot for rid in batch.ended if (slot := self._leave(rid)) is not None]
        joins: list[Join] = []
        pages: list[PageUpdate] = []
        if batch.decodes and self._decoding.goes_on(batch.slices):
            return self._decoding.plan(batch, leaves)
        layout = _Layout()
        for work in batch.slices:
            occupant = self._by_req.get(work.req) or self._enter(work.req, leaves, joins)
            kv = work.req.kv
            assert kv is not None, "a slice of a request without memory"
            if not occupant.knows(kv):
                _pages(occupant, kv, pages)
            layout.add(work, occupant)
        self._decoding = _Decoding(self._by_req, batch.slices) if batch.decodes else _Decoding()
        return StepPlan(
            num_slices=len(layout.slots),
            num_tokens=len(layout.ids),
            num_samples=len(layout.samples),
            num_in_flight=len(layout.rows),
            numbers=layout.numbers(),
            copies=batch.copies,
            leaves=leaves,
            joins=joins,
            pages=pages,
            prompt=layout.prompt,
            embeds=layout.embeds,
            token_types=layout.token_types(),
            states=_states(batch.slices),
        )

    def _enter(self, req: Req, leaves: list[int], joins: list[Join]) -> _Occupant:
        if (slot := self._leave(req.rid)) is not None:
            leaves.append(slot)
        if not self._free:
            leaves.append(self._evict())
        generates = isinstance(req.request, GenerateRequest)
        found = _Occupant(self._free.pop(), req, generates)
        self._by_rid[req.rid] = self._by_req[req] = found
        if isinstance(req.request, GenerateRequest):
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


class _Decoding:
    """Plans steps in which the same requests decode as in the step before, without looking at each.

    One token has come to each, which the executor knows: the newest of its slot. So the numbers are
    those of the step before, all positions one further.
    """

    def __init__(
        self, occupants: Mapping[Req, _Occupant] | None = None, slices: Sequence[Slice] = ()
    ) -> None:
        """`slices`: of a step of decodes; none of them leaves nothing to go on from."""
        self._slices = slices
        self._reqs = [work.req for work in slices]
        self._occupants = [occupants[req] for req in self._reqs] if occupants else []
        self._by_req = occupants or {}
        self._numbers: IntArray | None = None

    def goes_on(self, slices: Sequence[Slice]) -> bool:
        """Whether a step of decodes is of just the requests of the step before."""
        if not self._reqs:
            return False
        return slices is self._slices or [work.req for work in slices] == self._reqs

    def plan(self, batch: Batch, leaves: list[int]) -> StepPlan:
        """See `Planner.plan`."""
        count = len(self._reqs)
        if self._numbers is None:
            slots = [occupant.slot for occupant in self._occupants]
            starts = np.array([work.start for work in batch.slices], np.int32)
            each = np.arange(count, dtype=np.int32)
            rows = (slots, starts, starts + 1, each, each, slots, np.zeros(count, np.int32))
            self._numbers = np.concatenate(rows, dtype=np.int32)
        else:  # steps in flight read the old ones
            self._numbers = self._numbers.copy()
            self._numbers[count : 3 * count] += 1
        pages: list[PageUpdate] = []
        changed = self._occupants
        if batch.grown is not None and batch.slices is self._slices:
            changed = [self._by_req[req] for req in batch.grown]
        self._slices = batch.slices
        for occupant in changed:
            kv = occupant.req.kv
            assert kv is not None, "a slice of a request without memory"
            if not occupant.knows(kv):
                _pages(occupant, kv, pages)
        return StepPlan(
            num_slices=count,
            num_tokens=count,
            num_samples=count,
            num_in_flight=count,
            numbers=self._numbers,
            copies=batch.copies,
            leaves=leaves,
            pages=pages,
            states=_states(batch.slices),
        )


def _pages(occupant: _Occupant, kv: KVHandle, updates: list[PageUpdate]) -> None:
    known = occupant.num_pages
    if kv is not occupant.kv or kv.version != occupant.kv_version:
        known = 0
    if known < kv.num_pages:
        updates.append(PageUpdate(occupant.slot, known, kv.view()[known:].copy()))
    occupant.kv, occupant.kv_version, occupant.num_pages = kv, kv.version, kv.num_pages


def _states(slices: tuple[Slice, ...]) -> StateWork | None:
    if not slices or slices[0].req.kv is None or slices[0].req.kv.state is None:
        return None
    slots = np.zeros(len(slices), np.int32)
    copies: list[tuple[int, int]] = []
    saves: list[tuple[int, int, int]] = []
    for index, work in enumerate(slices):
        state = work.req.kv.state if work.req.kv else None
        assert state is not None, "a slice of a request without state"
        slots[index] = state.slot
        if work.start == state.begun:
            copies.append((state.source, state.slot))
        saves += [(index, tokens - work.start, slot) for tokens, slot in state.saves]
    return StateWork(slots, tuple(copies), tuple(saves))


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
        self.prompt: list[PromptWant] = []
        self.embeds: list[EmbedWork] = []
        self.types: list[tuple[int, IntArray]] = []  # of tokens, from a row on

    def add(self, work: Slice, occupant: _Occupant) -> None:
        """The next slice."""
        tokens, start, stop = work.req.tokens, work.start, work.stop
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
            self._embed(index, work, row)
            return
        if work.samples:
            self.samples.append(index)
        if work.start < work.req.prompt_len:
            want = _want_prompt(index, work, row)
            if want is not None:
                self.prompt.append(want)

    def _embed(self, index: int, work: Slice, row: int) -> None:
        request = work.req.request
        assert isinstance(request, EmbedRequest)
        asked = request.dimensions, request.normalize
        self.embeds.append(EmbedWork(index, work.start, work.samples, *asked))
        if request.token_types is not None:
            self.types.append((row, request.token_types[work.start : work.stop]))

    def token_types(self) -> IntArray | None:
        """See `StepPlan.token_types`."""
        if not self.types:
            return None
        found = np.zeros(len(self.ids), np.int32)
        for row, part in self.types:
            found[row : row + len(part)] = part
        return found

    def numbers(self) -> IntArray:
        """See `StepPlan.numbers`."""
        lists = (self.slots, self.starts, self.stops, self.samples, self.rows, self.sources)
        packed = array("i")
        for numbers in (*lists, self.ids):
            packed.extend(numbers)
        return np.frombuffer(packed, np.int32)


def _want_prompt(index: int, work: Slice, row: int) -> PromptWant | None:
    """Rows that predict prompt tokens; once outputs exist, the prompt has been answered for."""
    req = work.req
    assert isinstance(req.request, GenerateRequest)
    options = req.request.logprobs
    if options is None or options.start is None or req.num_tokens > req.prompt_len + work.samples:
        return None
    first = max(work.start, options.start)
    last = min(work.stop, req.prompt_len - 1)
    if first >= last:
        return None
    rows = np.arange(row + first - work.start, row + last - work.start, dtype=np.int32)
    return PromptWant(index, rows, req.tokens.view(first + 1, last + 1).copy())
