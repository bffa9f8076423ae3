"""One step's inputs, copied out of the scheduler's objects while it stands still.

A plan is made in the scheduler's thread, when a batch is launched. Executing it touches nothing
of the scheduler, so that the next step can be planned meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
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
    """Everything a step needs. T rows, R slices; `in_flight` are rows whose id is not known yet."""

    num_slices: int
    slots: IntArray  # (R,)
    starts: IntArray  # (R,)
    stops: IntArray  # (R,)
    samples: IntArray  # indices of slices that sample
    input_ids: IntArray  # (T,)
    in_flight: IntArray  # (<= R,) rows of T
    in_flight_slots: IntArray
    copies: tuple[tuple[int, int, int], ...] = ()
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    prompt: list[PromptWant] = field(default_factory=list)
    embeds: list[EmbedWork] = field(default_factory=list)
    token_types: IntArray | None = None  # (T,); None: all 0
    states: StateWork | None = None  # of models with recurrent layers


@dataclass(slots=True, eq=False)
class _Occupant:
    """What has been told about the request in a slot."""

    slot: int
    req: Req
    kv: KVHandle | None = None
    kv_version: int = -1
    num_pages: int = 0


class Planner:
    """Assigns request slots and finds what changed since the last step.

    A rid keeps its slot until it is named in `Batch.ended` or comes back as another `Req`. Pages
    are told again from the start when the handle is another one, or its version changed: that is
    what a preempted request looks like when it returns.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_rid: dict[str, _Occupant] = {}

    def plan(self, batch: Batch) -> StepPlan:
        """Copy out what the step needs.

        Raises:
            ExecutorError: more requests than slots.
        """
        leaves = [slot for rid in batch.ended if (slot := self._leave(rid)) is not None]
        joins: list[Join] = []
        pages: list[PageUpdate] = []
        occupants = [self._occupant(s.req, leaves, joins) for s in batch.slices]
        for occupant in occupants:
            _pages(occupant, pages)
        count = len(batch.slices)
        plan = StepPlan(
            num_slices=count,
            slots=np.fromiter((o.slot for o in occupants), np.int32, count),
            starts=np.fromiter((s.start for s in batch.slices), np.int32, count),
            stops=np.fromiter((s.stop for s in batch.slices), np.int32, count),
            samples=np.flatnonzero([_samples(s) for s in batch.slices]).astype(np.int32),
            input_ids=np.zeros(batch.num_tokens, np.int32),
            in_flight=EMPTY_IDS,
            in_flight_slots=EMPTY_IDS,
            copies=batch.copies,
            leaves=leaves,
            joins=joins,
            pages=pages,
        )
        _fill_tokens(plan, batch.slices)
        if count and (kv := batch.slices[0].req.kv) is not None and kv.state is not None:
            plan.states = _states(batch.slices)
        return plan

    def _occupant(self, req: Req, leaves: list[int], joins: list[Join]) -> _Occupant:
        found = self._by_rid.get(req.rid)
        if found is not None and found.req is req:
            return found
        if found is not None:
            self._leave(req.rid)
            leaves.append(found.slot)
        if not self._free:
            leaves.append(self._evict())
        found = self._by_rid[req.rid] = _Occupant(self._free.pop(), req)
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
        self._free.append(occupant.slot)
        return occupant.slot


def _samples(work: Slice) -> bool:
    return work.samples and isinstance(work.req.request, GenerateRequest)


def _pages(occupant: _Occupant, updates: list[PageUpdate]) -> None:
    kv = occupant.req.kv
    assert kv is not None, "a slice of a request without memory"
    known = occupant.num_pages
    if kv is not occupant.kv or kv.version != occupant.kv_version:
        known = 0
    if known < kv.num_pages:
        updates.append(PageUpdate(occupant.slot, known, kv.view()[known:].copy()))
    occupant.kv, occupant.kv_version, occupant.num_pages = kv, kv.version, kv.num_pages


def _states(slices: tuple[Slice, ...]) -> StateWork:
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


def _fill_tokens(plan: StepPlan, slices: tuple[Slice, ...]) -> None:
    row = 0
    rows: list[int] = []
    slots: list[int] = []
    for index, work in enumerate(slices):
        tokens, start, stop = work.req.tokens, work.start, work.stop
        known = min(stop, tokens.length)
        if known < stop:
            assert max(known, start) == stop - 1, "only the last token may be in flight"
            rows.append(row + stop - 1 - start)
            slots.append(int(plan.slots[index]))
        if start < known:
            plan.input_ids[row : row + known - start] = tokens.view(start, known)
        if isinstance(work.req.request, GenerateRequest):
            if work.req.request.logprobs is not None:
                _want_prompt(plan, index, work, row)
        else:
            _embed(plan, index, work, row)
        row += stop - work.start
    plan.in_flight = np.array(rows, np.int32)
    plan.in_flight_slots = np.array(slots, np.int32)


def _embed(plan: StepPlan, index: int, work: Slice, row: int) -> None:
    request = work.req.request
    assert isinstance(request, EmbedRequest)
    asked = request.dimensions, request.normalize
    plan.embeds.append(EmbedWork(index, work.start, work.samples, *asked))
    if request.token_types is not None:
        if plan.token_types is None:
            plan.token_types = np.zeros(len(plan.input_ids), np.int32)
        part = request.token_types[work.start : work.stop]
        plan.token_types[row : row + len(part)] = part


def _want_prompt(plan: StepPlan, index: int, work: Slice, row: int) -> None:
    """Rows that predict prompt tokens; once outputs exist, the prompt has been answered for."""
    req = work.req
    assert isinstance(req.request, GenerateRequest)
    options = req.request.logprobs
    if options is None or options.start is None or req.num_tokens > req.prompt_len + work.samples:
        return
    first = max(work.start, options.start)
    last = min(work.stop, req.prompt_len - 1)
    if first < last:
        rows = np.arange(row + first - work.start, row + last - work.start, dtype=np.int32)
        ids = req.tokens.view(first + 1, last + 1).copy()
        plan.prompt.append(PromptWant(index, rows, ids))
