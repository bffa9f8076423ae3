"""Control half of a decode server: requests start with the KV of their prompts."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import Bootstrap, GenerateRequest
from sylvan.runtime.cache.types import RunningState
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.features.disagg.counts import TransferStats
from sylvan.runtime.features.disagg.kv_layout import KVLayout
from sylvan.runtime.features.disagg.messages import prompt_digest
from sylvan.runtime.features.disagg.store import SharedStore
from sylvan.runtime.features.disagg.work import (
    DecodeEvents,
    DecodeWork,
    JoinRoom,
    Leave,
    LeaveDone,
    PrefillAgain,
    Progress,
    Receive,
    Received,
    Refused,
    TransferFailed,
)
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

REFUSED_STATUS = 503
"""Status for mismatched servers: gateways then try another pair."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """The transfer of one prompt.

    Attributes:
        job: Number of the job.
        touched_s: Time of the last progress.
        filling: Its pages may be written.
        leaving: The worker half was asked to stop.
        whole: All KV except the last token's has arrived.
        failed: The prompt is recomputed here once nothing is written any more.
        error: Why the request fails.
        arrived_s: Arrival time of the request.
        length: Known tokens at that time.
        again: The request was retracted, and its prefill server was asked once more.
        met: The prefill server accepted the connection.
        computed: Tokens whose KV is present after the transfer.
        state: The recurrent state being filled.
    """

    job: int
    req: Req
    touched_s: float
    filling: bool = False
    leaving: bool = False
    whole: bool = False
    failed: bool = False
    error: str = ""
    arrived_s: float = 0.0
    length: int = 0
    again: bool = False
    met: bool = False
    computed: int = 0
    state: RunningState | None = None


@dataclass(frozen=True, slots=True)
class MissingKVPolicy:
    """Handling of missing KV.

    Attributes:
        falls_back: Recompute the prompt here if its transfer fails.
        asks_again: Ask the prefill server to recompute what was retracted here.
    """

    falls_back: bool = True
    asks_again: bool = False


class DecodeRole(Capability):
    """Receives the KV of prompts from prefill servers directly into the requests' pages.

    A request with a room gets memory for its prompt as soon as there is some, and loads: all pages
    missing from the prefix cache come from the prefill server. Then it computes the last token of
    the prompt (with recurrent layers, from the last page boundary on) and samples the first output
    token. Random numbers are keyed by position, so the answer is bit-identical to that of a server
    that does everything itself.

    Args:
        shape: KV groups of the model.
        timeout_s: Longest wait for progress of the prefill server.
        records: Statistics.
        policy: What to do if KV is missing.
        store: Store that KV is read from; None: it comes from the prefill server.
    """

    name: ClassVar = "disagg_decode"
    work_type: ClassVar = DecodeWork
    report_type: ClassVar = DecodeEvents

    def __init__(
        self,
        shape: KVLayout,
        timeout_s: float,
        records: TransferStats,
        policy: MissingKVPolicy,
        *,
        store: SharedStore | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._shape, self._timeout_s = shape, timeout_s
        self._falls_back, self._asks_again = policy.falls_back, policy.asks_again
        self._store, self._clock = store, clock
        self.counts, self._times = records.counts, records.times
        self._port: SchedulerPort | None = None
        self._numbers = itertools.count(1)
        self._by_rid: dict[str, _Incoming] = {}
        self._by_job: dict[int, _Incoming] = {}
        self._outbox: list[JoinRoom | PrefillAgain | Receive | Leave] = []
        self._retracted: dict[str, int] = {}  # when KV was requested again, by request ID

    # ---- steps

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def poll(self) -> None:
        assert self._port is not None
        now = self._clock()
        for found in tuple(self._by_job.values()):
            if not found.leaving and now - found.touched_s >= self._timeout_s:
                reason = f"the prefill server sent nothing for {self._timeout_s:g} s"
                self._fail(found, reason)
                self._leave(found)

    def wants_step(self) -> bool:
        """Reports of the worker half arrive only with steps."""
        return bool(self._by_job)

    def plan_work(self, batch: Batch) -> DecodeWork | None:
        if not self.wants_step() and not self._outbox:
            return None
        work, self._outbox = tuple(self._outbox), []
        return work

    def on_result(self, batch: Batch, report: Any) -> None:
        for event in report or ():
            self._on_event(event)

    # ---- requests

    def on_arrival(self, req: Req) -> None:
        """Start the transfer; replayed requests compute everything."""
        request = req.request
        if not isinstance(request, GenerateRequest) or request.bootstrap is None:
            return
        if request.bootstrap.role == "prefill":
            return
        rendezvous = request.bootstrap
        found = self._join(req, rendezvous, rendezvous.room)
        if self._store is not None:  # carries only the message that the KV is in the store
            total = self._shape.pages(self._shape.covered(req.prompt_len))
            self._outbox.append(Receive(found.job, total, ()))
        self.counts.started += 1

    def _join(self, req: Req, rendezvous: Bootstrap, room: int) -> _Incoming:
        """Connect to the prefill server for all known tokens of a request."""
        now, length = self._clock(), len(req.tokens)
        found = _Incoming(next(self._numbers), req, now, arrived_s=now, length=length)
        self._by_rid[req.rid] = self._by_job[found.job] = found
        request = req.request
        digest = prompt_digest(req.tokens.view(0, length), request.lora)
        self._outbox.append(JoinRoom(found.job, rendezvous.host, rendezvous.port, room, digest))
        return found

    def _ask_again(self, req: Req) -> None:
        """Have the prefill server recompute a retracted request."""
        request = req.request
        if not isinstance(request, GenerateRequest) or request.bootstrap is None:
            return
        cannot_fetch = request.bootstrap.role == "prefill" or request.lora is not None
        seen = self._retracted.get(req.rid, 0)
        if cannot_fetch or not req.may_load or req.pending or req.retractions <= seen:
            return
        self._retracted[req.rid] = req.retractions
        rendezvous, room = request.bootstrap, secrets.randbits(62)
        found = self._join(req, rendezvous, room)
        found.again = True
        self.counts.again += 1
        self.counts.started += 1
        ids = req.tokens.view(0, found.length).copy()
        self._outbox.append(PrefillAgain(found.job, rendezvous.host, rendezvous.port, room, ids))

    def gate(self, req: Req) -> Verdict:
        found = self._by_rid.get(req.rid)
        if found is not None and found.error:
            raise RequestError(found.error, param="bootstrap_room", status=REFUSED_STATUS)
        waits = self._store is not None and found is not None and found.job in self._by_job
        return Verdict.WAIT if waits else Verdict.READY

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        if self._asks_again and req.retractions and req.rid not in self._by_rid:
            self._ask_again(req)
        found = self._by_rid.get(req.rid)
        if found is None or found.failed or self._store is not None:
            return Verdict.READY
        return Verdict.LOAD

    def load_limit(self, req: Req) -> int | None:
        """Load no KV from a tier where it comes from a prefill server."""
        found = self._by_rid.get(req.rid)
        return None if found is None or found.failed or self._store is not None else 0

    def on_load(self, req: Req) -> None:
        """Request the pages that the prefix cache lacks."""
        found = self._by_rid.get(req.rid)
        if found is None or req.kv is None:
            return
        found.filling, found.touched_s = True, self._clock()
        self._times.alloc_ms.observe(1000 * (found.touched_s - found.arrived_s))
        kv, covered = req.kv, self._shape.covered(found.length)
        first = kv.cached // self._shape.page_size
        stop = max(first, self._shape.pages(covered))
        pages = tuple(kv.pages[first:stop].tolist()) if self._shape.streams else ()
        page_sets = self._shape.windows(kv, first, covered)
        if kv.state is not None and stop > first:
            page_sets = (*page_sets, self._shape.state(kv.state.slot))
            found.state = kv.state
        found.computed = max(covered, kv.cached)
        self._outbox.append(Receive(found.job, first, pages, page_sets))

    def stop_loading(self, req: Req) -> bool:
        """Never stop here: `poll` checks for progress."""
        return req.rid not in self._by_rid

    def on_finish(self, req: Req) -> None:
        self._retracted.pop(req.rid, None)
        found = self._by_rid.get(req.rid)
        if found is None:
            return
        under_way = found.job in self._by_job
        if under_way:
            self._leave(found)
        if not (under_way and found.filling):
            del self._by_rid[req.rid]

    def holds(self, req: Req) -> bool:
        """Keep the pages while they may be written."""
        return req.rid in self._by_rid

    def queues(self) -> dict[str, int]:
        """Return how many requests wait, by reason."""
        filling = sum(found.filling for found in self._by_job.values())
        return {
            "decode_prealloc_queue_reqs": len(self._by_job) - filling,
            "decode_transfer_queue_reqs": filling,
            "decode_retracted_queue_reqs": sum(found.again for found in self._by_job.values()),
        }

    # ---- inside

    def _on_event(self, event: Progress | Received | Refused | TransferFailed | LeaveDone) -> None:
        found = self._by_job.get(event.job)
        if found is None:
            return
        found.touched_s = self._clock()
        match event:
            case Progress():
                found.met = True
                self._times.bootstrap_ms.observe(1000 * (found.touched_s - found.arrived_s))
                return
            case Received():
                self.counts.num_bytes += event.num_bytes
                self.counts.seconds += event.seconds
                self._times.moved(event.num_bytes, event.seconds)
                found.whole = True
            case Refused(reason=reason):
                self.counts.refused += 1
                found.error = f"disaggregated prefill was rejected: {reason}"
            case TransferFailed(reason=reason):
                self._fail(found, reason)
            case LeaveDone():
                pass
        self._end(found)

    def _end(self, found: _Incoming) -> None:
        """The job is over: nothing is written, and the worker half has forgotten it."""
        assert self._port is not None
        del self._by_job[found.job]
        if found.failed and not found.whole:  # the KV arrived after all, and is used
            self.counts.failed += 1
            self.counts.unmet += not found.met
        rid = found.req.rid
        if self._by_rid.get(rid) is not found:
            return
        if found.req.finish is not None:  # the request ended meanwhile
            del self._by_rid[rid]
            self._port.release(rid)
        elif self._store is not None:
            self.counts.done += found.whole
            if not found.error:
                del self._by_rid[rid]
                self._store.prefetch_again(found.req, self._timeout_s)
        elif found.whole:
            self.counts.done += 1
            del self._by_rid[rid]
            if (state := found.state) is not None:  # continue from what arrived
                state.begun, state.source = found.computed, state.slot
            self._port.loaded(rid, found.computed)
        elif found.error:
            self._port.load_failed(rid)  # `gate` then fails the request
        else:
            del self._by_rid[rid]
            self._port.load_failed(rid)

    def _fail(self, found: _Incoming, reason: str) -> None:
        found.failed = True
        logger.warning("KV of request %s does not arrive: %s", found.req.rid, reason)
        if not self._falls_back:
            found.error = f"disaggregated prefill failed: {reason}"

    def _leave(self, found: _Incoming) -> None:
        if not found.leaving:
            found.leaving = True
            self._outbox.append(Leave(found.job))
