"""Control half: which requests may start beside which, and what is where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.lora.copies import AdapterEntry, Copy, HostCopies
from sylvan.runtime.features.lora.slots import AdapterSlots, Eviction
from sylvan.runtime.features.lora.turns import Turns
from sylvan.runtime.features.lora.work import AdapterRows, LoraReport, LoraWork
from sylvan.runtime.sched.capability import Capability, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraLimits:
    """Bounds of LoRA serving.

    Attributes:
        slots: Adapters in one step.
        copies: Adapters in host memory.
        copy_bytes: Of all of these.
        max_overtakes: See `turns`.
        eviction: Which adapter leaves its slot first.
    """

    slots: int
    copies: int
    copy_bytes: int
    max_overtakes: int
    eviction: Eviction = "lru"


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """How full slots and host memory are."""

    slots_used: int
    slots_total: int
    copies: int
    loaded: int


class Lora(Capability):
    """Requests name an adapter by its id (`GenerateRequest.lora`).

    An id stands for a name and contents, so keys and values of two adapters never meet in the
    prefix cache, not even when one took the name of the other.
    """

    name: ClassVar = "lora"
    work_type: ClassVar = LoraWork
    report_type: ClassVar = LoraReport

    def __init__(self, limits: LoraLimits) -> None:
        self._limits = limits
        self._slots = AdapterSlots(limits.slots, limits.eviction)
        self._copies = HostCopies(limits.copies, limits.copy_bytes)
        self._turns = Turns(limits.slots, limits.max_overtakes)
        self._pinned: set[str] = set()
        self._started: set[str] = set()  # requests with an adapter
        self._running: Counter[str] = Counter()
        self._counted = -1  # requests that `_running` was counted of
        self._has_rows = False  # of the newest step

    # ---- adapters come and go

    def add(self, adapter: AdapterEntry, *, resident: bool) -> None:
        """Serve an adapter from now on; `resident`: the worker half has its copy.

        Raises:
            RequestError: it is to be pinned, and as many are as can be.
        """
        pinned = self._pinned | {adapter.id}
        if adapter.pinned and len(pinned) >= self._limits.slots:
            if self._copies.get(adapter.id) is None:
                self._copies.add(adapter, resident=resident)
                self._copies.leave(adapter)  # its copy goes again
            raise RequestError(
                f"pinned: {len(self._pinned)} adapters are pinned; at most "
                f"{self._limits.slots - 1} can be (lora.max_per_batch - 1)",
                param="pinned",
            )
        self._copies.add(adapter, resident=resident)
        if adapter.pinned:
            self._pinned.add(adapter.id)
        else:
            self._pinned.discard(adapter.id)

    def remove(self, adapter: str, live: Iterable[Req]) -> tuple[str, ...]:
        """Serve no new requests with an adapter; those among `live` go on.

        Returns the names of these.
        """
        known = self._copies.get(adapter)
        if known is None:
            return ()
        self._copies.leave(known)
        self._pinned.discard(adapter)
        known.requests |= {req.rid for req in live if _adapter_of(req) == adapter}
        return tuple(known.requests)

    @property
    def has_room(self) -> bool:
        """Whether one more adapter, as large as any so far, fits into host memory."""
        return self._copies.has_room

    def is_resident(self, adapter: str) -> bool:
        """Whether there is a host copy."""
        known = self._copies.get(adapter)
        return known is not None and known.copy is Copy.RESIDENT

    @property
    def load(self) -> LoraLoad:
        """For metrics."""
        loaded = sum(not adapter.leaving for adapter in self._copies)
        used = self._slots.used
        return LoraLoad(used, self._slots.count, self._copies.num_resident, loaded)

    # ---- hooks

    def poll(self) -> None:
        """A step begins."""
        self._turns.next_step()
        self._counted = -1

    def gate(self, req: Req) -> Verdict:
        """Wait for the host copy."""
        if (name := _adapter_of(req)) is None:
            return Verdict.READY
        adapter = self._copies.get(name)
        if adapter is None or (adapter.leaving and req.rid not in adapter.requests):
            raise RequestError(
                f"the adapter {name.partition('@')[0]!r} was unloaded", param="lora_path"
            )
        if adapter.error and req.rid in adapter.requests:
            raise RequestError(adapter.error, param="lora_path")
        adapter.requests.add(req.rid)
        if self._copies.use(adapter):
            return Verdict.READY
        self._turns.wait(req.rid, name, lacks_slot=adapter.copy is Copy.LOADING)
        return Verdict.WAIT

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        """Wait for a slot."""
        if (name := _adapter_of(req)) is None:
            self._counted = -1  # others may be retracted for it
            return Verdict.READY
        if self._counted != len(admitted):
            names = (_adapter_of(other) for other in admitted)
            self._running = Counter(name for name in names if name is not None)
            self._counted = len(admitted)
        if not self._turns.may_start(req.rid, name, self._running, self._pinned):
            return Verdict.WAIT
        self._counted = -1
        return Verdict.READY

    def cache_namespace(self, req: Req) -> str:
        """The id; that of a request to generate is part of its key already."""
        return "" if req.generates else _adapter_of(req) or ""

    def on_start(self, piece: Slice) -> None:
        """A request has its slot."""
        req = piece.req
        if (name := _adapter_of(req)) is None:
            return
        self._turns.started(req.rid, name)
        adapter = self._copies.get(name)
        assert adapter is not None, "its gate let it through"
        adapter.fresh = False
        adapter.running.add(req.rid)
        self._started.add(req.rid)

    def plan_work(self, batch: Batch) -> LoraWork | None:
        """Where the rows of each adapter are, and what has to be loaded for this step or later."""
        rows = self._rows(batch) if self._started else ()
        idle = not (rows or self._has_rows or self._copies.has_work or self._copies.loading)
        if idle:
            return None
        names = [name for piece in batch.slices if (name := _adapter_of(piece.req)) is not None]
        dropped, loads = self._copies.next_loads()
        for name in dropped:
            self._slots.remove(name)
        changed = self._slots.place(names, self._pinned)
        self._has_rows = bool(rows)
        return LoraWork(
            drop=tuple(dropped),
            load=tuple(loads),
            slots=dict(changed),
            rows=tuple(AdapterRows(self._slots[name], start, stop) for name, start, stop in rows),
        )

    def wants_step(self) -> bool:
        """Copies are to be read or given back."""
        return self._copies.has_work or self._copies.loading

    def on_result(self, batch: Batch, report: LoraReport | None) -> None:
        """Copies were read."""
        if report is not None:
            for name in report.loaded:
                self._copies.loaded(name)
            for name, why in report.failed.items():
                self._copies.failed(name, why)

    def on_finish(self, req: Req) -> None:
        """A request needs its adapter no more."""
        if (name := _adapter_of(req)) is None:
            return
        self._turns.ended(req.rid, name)
        self._started.discard(req.rid)
        if (adapter := self._copies.get(name)) is not None:
            adapter.requests.discard(req.rid)
            adapter.running.discard(req.rid)
            if not adapter.requests:
                adapter.error = ""  # the next one has it read again

    # ---- inside

    def _rows(self, batch: Batch) -> list[tuple[str, int, int]]:
        """Adapter and rows of each request that has one; neighbours with the same are joined."""
        found: list[tuple[str, int, int]] = []
        row = 0
        for piece in batch.slices:
            start, draft = row, piece.draft
            row += piece.stop - piece.start + (len(draft.tokens) if draft else 0)
            name = _adapter_of(piece.req)
            if name is None:
                continue
            if found and found[-1][0] == name and found[-1][2] == start:
                start = found.pop()[1]
            found.append((name, start, row))
        return found


def _adapter_of(req: Req) -> str | None:
    return req.request.lora
