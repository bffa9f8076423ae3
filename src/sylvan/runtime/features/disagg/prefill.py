"""Control half of a prefill server: which pages are sent when, and how long they are kept."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.types import CacheKey, KVHandle, Place
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.disagg.counts import TransferStats
from sylvan.runtime.features.disagg.kv_layout import KVLayout
from sylvan.runtime.features.disagg.messages import prompt_digest
from sylvan.runtime.features.disagg.sender import USED_ROOMS
from sylvan.runtime.features.disagg.store import SharedStore
from sylvan.runtime.features.disagg.work import (
    Expose,
    PageSet,
    PagesRequested,
    PrefillEvents,
    PrefillWork,
    SendingEnded,
    SendPages,
    Sent,
    Withdraw,
)
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The transfer of one prompt.

    Attributes:
        job: Number of the job.
        covered: Tokens whose KV is sent; see `KVLayout.covered`.
        total: Number of their pages.
        touched_s: Time of the last progress.
        ready: Tokens whose KV is computed, according to finished steps.
        next: The first unsent page; None until a decode server has asked.
        asked: The first requested page.
        finished: The request has finished here.
        sent: The last page was passed to the worker half.
        error: Why the request fails.
        arrived_s: Arrival time of the request.
        sent_s: When the last page was passed to the worker half.
        num_bytes: Bytes sent.
        writes: Store writes that began before all pages had left the device.
    """

    job: int
    req: Req
    covered: int
    total: int
    touched_s: float
    ready: int = 0
    next: int | None = None
    asked: int | None = None
    finished: bool = False
    sent: bool = False
    error: str = ""
    arrived_s: float = 0.0
    sent_s: float = 0.0
    num_bytes: int = 0
    writes: frozenset[int] | None = None


class PrefillRole(Capability):
    """Sends the KV of prompts to decode servers, in chunks while they are computed.

    A request with a room computes its prompt and the first token as usual. It keeps its pages
    until the decode server has received them, or stops responding.

    Args:
        shape: KV groups of the model.
        cache: Prefix cache, which holds the recurrent states of prompts.
        timeout_s: How long a finished request keeps its pages without a message from
            a decode server.
        records: Statistics.
        store: Store that the KV is written to; the decode server reads it from there when notified;
            None: this server sends it.
    """

    name: ClassVar = "disagg_prefill"
    work_type: ClassVar = PrefillWork
    report_type: ClassVar = PrefillEvents

    def __init__(
        self,
        shape: KVLayout,
        cache: KVCacheManager,
        timeout_s: float,
        records: TransferStats,
        *,
        store: SharedStore | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._shape, self._cache = shape, cache
        self._timeout_s = timeout_s
        self.counts, self._times, self._clock = records.counts, records.times, clock
        self._port: SchedulerPort | None = None
        self._numbers = itertools.count(1)
        self._by_rid: dict[str, _Outgoing] = {}
        self._by_job: dict[int, _Outgoing] = {}
        self._outbox: list[Expose | SendPages | Withdraw] = []
        self._rooms: OrderedDict[int, None] = OrderedDict()

    # ---- steps

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def poll(self) -> None:
        """End requests whose decode server has not responded in time."""
        now = self._clock()
        for out in tuple(self._by_job.values()):
            late = now - out.touched_s >= self._timeout_s
            if late and (out.finished or out.next is not None):
                self._withdraw(out, f"no message from a decode server for {self._timeout_s:g} s")

    def wants_step(self) -> bool:
        """Reports of the worker half arrive only with steps."""
        return bool(self._by_job or self._outbox)

    def plan_work(self, batch: Batch) -> PrefillWork | None:
        if not self.wants_step():
            return None
        for out in self._by_job.values():
            self._plan_pages(out)
        work, self._outbox = tuple(self._outbox), []
        return work

    def on_result(self, batch: Batch, report: Any) -> None:
        for piece in batch.slices if self._by_rid else ():
            out = self._by_rid.get(piece.req.rid)
            if out is not None:
                out.ready = max(out.ready, piece.stop)
        for event in report or ():
            self._on_event(event)

    # ---- requests

    def on_arrival(self, req: Req) -> None:
        request = req.request
        if not isinstance(request, GenerateRequest) or request.bootstrap is None:
            return
        if request.bootstrap.role == "decode":
            return
        room = request.bootstrap.room
        covered = self._shape.covered(req.prompt_len)
        total, number = self._shape.pages(covered), next(self._numbers)
        out = self._by_rid[req.rid] = _Outgoing(number, req, covered, total, self._clock())
        if room in self._rooms:
            out.error = f"bootstrap_room {room} was used before"
            self.counts.refused += 1
            return
        self._rooms[room] = None
        if len(self._rooms) > USED_ROOMS:
            self._rooms.popitem(last=False)
        self._by_job[out.job], out.arrived_s = out, out.touched_s
        self._outbox.append(Expose(out.job, room, prompt_digest(request.input_ids, request.lora)))
        self.counts.started += 1

    def gate(self, req: Req) -> Verdict:
        out = self._by_rid.get(req.rid)
        if out is not None and out.error:
            raise RequestError(out.error, param="bootstrap_room")
        return Verdict.READY

    def on_start(self, piece: Slice) -> None:
        """Restart: KV computed in earlier memory no longer counts."""
        if (out := self._by_rid.get(piece.req.rid)) is not None:
            out.ready = 0

    def on_finish(self, req: Req) -> None:
        out = self._by_rid.get(req.rid)
        if out is None:
            return
        out.finished, out.touched_s = True, self._clock()
        if out.error:
            del self._by_rid[req.rid]
        elif req.finish is not None and req.finish.type == "abort":
            self._withdraw(out, req.finish.message or "the request was aborted")

    def holds(self, req: Req) -> bool:
        """Keep the pages until the decode server has received them."""
        return req.rid in self._by_rid and self._store is None

    def queues(self) -> dict[str, int]:
        """Return how many requests wait, by reason."""
        asked = sum(out.asked is not None for out in self._by_job.values())
        return {
            "prefill_bootstrap_queue_reqs": len(self._by_job) - asked,
            "prefill_inflight_queue_reqs": asked,
        }

    # ---- inside

    def _plan_pages(self, out: _Outgoing) -> None:
        """Pass the pages that can be sent now to the worker half."""
        kv = out.req.kv
        if out.next is not None and not out.sent and self._store is not None:
            self._plan_store(out, self._store)
            return
        if out.next is None or out.sent or kv is None:
            return
        whole = out.ready >= out.covered
        stop = out.total if whole else min(out.total, out.ready // self._shape.page_size)
        if not self._shape.streams:
            stop = out.total if whole else 0
        last = whole and stop >= out.total
        if stop <= out.next and not last:
            return
        pages: tuple[int, ...] = ()
        if self._shape.streams:
            pages = tuple(kv.pages[out.next : stop].tolist())
        page_sets = self._page_sets(out, kv) if last else ()
        if page_sets is None:
            return
        self._outbox.append(SendPages(out.job, out.next, pages, last, page_sets))
        out.next, out.sent, out.sent_s = max(out.next, stop), last, self._clock()

    def _plan_store(self, out: _Outgoing, store: SharedStore) -> None:
        """Tell the decode server once the store has all whole pages of a prompt."""
        loads, known = self._cache.loads, out.req.key
        if not out.finished or known is None or loads is None:
            return
        if out.writes is None:
            tokens = out.covered // self._shape.page_size * self._shape.page_size
            key = CacheKey(out.req.request.input_ids[:tokens], known.namespace, known.media)
            if loads.residency.cached_in(Place.STORAGE, key, tokens) < tokens:
                return
            out.writes = store.writing
        out.writes &= store.writing
        if not out.writes:
            self._outbox.append(SendPages(out.job, out.total, (), last=True))
            out.sent, out.sent_s = True, self._clock()

    def _page_sets(self, out: _Outgoing, kv: KVHandle) -> tuple[PageSet, ...] | None:
        """Return the page sets sent at the end; None, and the job withdrawn, if one was evicted."""
        assert out.asked is not None
        page_sets = self._shape.windows(kv, out.asked, out.covered)
        states = self._cache.states
        if states is not None and self._shape.pages(out.covered) > out.asked:
            key = CacheKey(out.req.tokens.view(0, out.covered), kv.key.namespace, kv.key.media)
            slot = states.slot_after(key)
            page_sets = (*page_sets, self._shape.state(slot))
        if not all(all(page_set.pages) for page_set in page_sets):
            self._withdraw(out, "the recurrent state of the prompt was evicted before its transfer")
            return None
        return page_sets

    def _on_event(self, event: PagesRequested | Sent | SendingEnded) -> None:
        out = self._by_job.get(event.job)
        if out is None:
            return
        out.touched_s = self._clock()
        match event:
            case PagesRequested(first=first):
                out.next = out.asked = min(first, out.total)
                self._times.bootstrap_ms.observe(1000 * (out.touched_s - out.arrived_s))
            case Sent(num_bytes=size):
                self.counts.num_bytes += size
                out.num_bytes += size
            case SendingEnded(error=error):
                self._end(out, error)

    def _end(self, out: _Outgoing, error: str) -> None:
        """The job is over: the worker half has forgotten it."""
        del self._by_job[out.job]
        if error:
            self.counts.failed += 1
            self.counts.unmet += out.asked is None
            logger.warning("KV of request %s was not sent: %s", out.req.rid, error)
        else:
            self.counts.done += 1
            self._times.moved(out.num_bytes, self._clock() - out.sent_s)
        self._release(out)

    def _withdraw(self, out: _Outgoing, reason: str) -> None:
        self._outbox.append(Withdraw(out.job, reason))
        out.next, out.sent = None, True
        out.touched_s = self._clock()
        self._release(out)

    def _release(self, out: _Outgoing) -> None:
        """Release the pages of the request."""
        assert self._port is not None
        if self._by_rid.get(out.req.rid) is out:
            del self._by_rid[out.req.rid]
            self._port.release(out.req.rid)
