"""Control half: which adapters are resident, and which requests may run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.lora.copies import AdapterEntry, Copy, HostCopies
from sylvan.runtime.features.lora.slot_queue import SlotQueue
from sylvan.runtime.features.lora.slots import AdapterSlots, Eviction
from sylvan.runtime.features.lora.work import AdapterRows, LoraReport, LoraWork
from sylvan.runtime.sched.capability import Capability, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraLimits:
    """Limits of LoRA serving.

    Attributes:
        slots: Adapters in one step.
        copies: Adapters in host memory.
        copy_bytes: Their total size.
        max_overtakes: See `slot_queue`.
        eviction: Which adapter is evicted from its slot first.
    """

    slots: int
    copies: int
    copy_bytes: int
    max_overtakes: int
    eviction: Eviction = "lru"


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """Usage of slots and host memory."""

    slots_used: int
    slots_total: int
    copies: int
    loaded: int


class Lora(Capability):
    """Requests name an adapter by its ID (`GenerateRequest.lora`).

    An ID stands for a name and contents, so KV of two adapters is never shared in the
    prefix cache, even if one reuses the name of the other.
    """

    name: ClassVar = "lora"
    work_type: ClassVar = LoraWork
    report_type: ClassVar = LoraReport

    def __init__(self, limits: LoraLimits) -> None:
        self._limits = limits
        self._slots = AdapterSlots(limits.slots, limits.eviction)
        self._copies = HostCopies(limits.copies, limits.copy_bytes)
        self._slot_queue = SlotQueue(limits.slots, limits.max_overtakes)
        self._pinned: set[str] = set()
        self._started: set[str] = set()  # requests with an adapter
        self._running: Counter[str] = Counter()
        self._counted = -1  # requests that `_running` was counted from
        self._has_rows = False  # of the newest step

    # ---- loading and unloading

    def add(self, adapter: AdapterEntry, *, resident: bool) -> None:
        """Start serving an adapter; `resident`: the worker half has its host copy.

        Raises:
            RequestError: It is to be pinned, but the maximum of adapters is pinned.
        """
        pinned = self._pinned | {adapter.id}
        if adapter.pinned and len(pinned) >= self._limits.slots:
            if self._copies.get(adapter.id) is None:
                self._copies.add(adapter, resident=resident)
                self._copies.leave(adapter)  # undo its host copy
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
        """Serve no new requests with an adapter; those among `live` continue.

        Returns the IDs of those requests.
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
        """Whether another adapter, as large as the largest so far, fits into host memory."""
        return self._copies.has_room

    def is_resident(self, adapter: str) -> bool:
        """Whether the adapter has a host copy."""
        known = self._copies.get(adapter)
        return known is not None and known.copy is Copy.RESIDENT

    @property
    def load(self) -> LoraLoad:
        """Return the load for metrics."""
        loaded = sum(not adapter.leaving for adapter in self._copies)
        used = self._slots.used
        return LoraLoad(used, self._slots.count, self._copies.num_resident, loaded)

    # ---- hooks

    def poll(self) -> None:
        """Start a step."""
        self._slot_queue.next_step()
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
        self._slot_queue.wait(req.rid, name, lacks_slot=adapter.copy is Copy.LOADING)
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
        if not self._slot_queue.may_start(req.rid, name, self._running, self._pinned):
            return Verdict.WAIT
        self._counted = -1
        return Verdict.READY

    def cache_namespace(self, req: Req) -> str:
        """Return the adapter ID; a generation request's key already contains it."""
        return "" if req.generates else _adapter_of(req) or ""

    def on_start(self, piece: Slice) -> None:
        """Record that a request got its slot."""
        req = piece.req
        if (name := _adapter_of(req)) is None:
            return
        self._slot_queue.started(req.rid, name)
        adapter = self._copies.get(name)
        assert adapter is not None, "its gate let it through"
        adapter.fresh = False
        adapter.running.add(req.rid)
        self._started.add(req.rid)

    def plan_work(self, batch: Batch) -> LoraWork | None:
        """Return the rows of each adapter, and the adapters to load for this step or later."""
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
        """A step is needed to read or free host copies."""
        return self._copies.has_work or self._copies.loading

    def on_result(self, batch: Batch, report: LoraReport | None) -> None:
        """Record which copies were read."""
        if report is not None:
            for name in report.loaded:
                self._copies.loaded(name)
            for name, why in report.failed.items():
                self._copies.failed(name, why)

    def on_finish(self, req: Req) -> None:
        """Release the adapter of a finished request."""
        if (name := _adapter_of(req)) is None:
            return
        self._slot_queue.ended(req.rid, name)
        self._started.discard(req.rid)
        if (adapter := self._copies.get(name)) is not None:
            adapter.requests.discard(req.rid)
            adapter.running.discard(req.rid)
            if not adapter.requests:
                adapter.error = ""  # the next request reads it again

    # ---- inside

    def _rows(self, batch: Batch) -> list[tuple[str, int, int]]:
        """Return adapter and rows of each request that has one; adjacent equal ones are merged."""
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
