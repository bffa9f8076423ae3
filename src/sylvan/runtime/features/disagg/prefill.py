"""Control half of a prefill server: what of a prompt is sent when, and how long it is kept."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.disagg.counts import TransferCounts
from sylvan.runtime.features.disagg.data import (
    Asked,
    Expose,
    Over,
    PrefillEvents,
    PrefillWork,
    SendPages,
    Sent,
    Withdraw,
)
from sylvan.runtime.features.disagg.messages import prompt_digest
from sylvan.runtime.features.disagg.sender import USED_ROOMS
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """One prompt.

    Attributes:
        job: Its number.
        total: Pages that hold all tokens but the last, which the decode server computes.
        touched_s: When something last happened to it.
        ready: Tokens that the memory of the request holds, by the results of steps.
        next: The first page that was not sent; None until a decode server has asked.
        staged: Bytes in host memory.
        finished: The request has ended here.
        sent: The last page was given to the worker half.
        error: Why the request is to be refused.
    """

    job: int
    req: Req
    total: int
    touched_s: float
    ready: int = 0
    next: int | None = None
    staged: int = 0
    finished: bool = False
    sent: bool = False
    error: str = ""


class PrefillRole(Capability):
    """Sends the KV of prompts to decode servers, chunk by chunk while they are computed.

    A request with a room computes its prompt and the first token as any other. What a decode
    server lacks of it is copied to host memory, from which it is sent, so that the pages of the
    request are free as soon as the last of them was copied.

    Args:
        page_size: Tokens of a page.
        page_bytes: Of a page.
        max_staged_bytes: Host memory for pages that are being sent; one copy is always made.
        timeout_s: A request that has ended keeps its pages for so long without a sign of life from
            a decode server.
        counts: Told what happens.
    """

    name: ClassVar = "disagg_prefill"
    work_type: ClassVar = PrefillWork
    report_type: ClassVar = PrefillEvents

    def __init__(
        self,
        page_size: int,
        page_bytes: int,
        max_staged_bytes: int,
        timeout_s: float,
        counts: TransferCounts,
        clock: Clock = monotonic,
    ) -> None:
        self._page_size, self._page_bytes = page_size, page_bytes
        self._max_staged_bytes, self._timeout_s = max_staged_bytes, timeout_s
        self.counts, self._clock = counts, clock
        self._port: SchedulerPort | None = None
        self._numbers = itertools.count(1)
        self._by_rid: dict[str, _Outgoing] = {}
        self._by_job: dict[int, _Outgoing] = {}
        self._outbox: list[Expose | SendPages | Withdraw] = []
        self._copied: list[_Outgoing] = []  # by the step that was launched last
        self._rooms: OrderedDict[int, None] = OrderedDict()
        self._staged = 0

    # ---- steps

    def attach(self, port: SchedulerPort) -> None:
        """See `Capability.attach`."""
        self._port = port

    def poll(self) -> None:
        """See `Capability.poll`: nobody waits for a decode server for ever."""
        now = self._clock()
        copied, self._copied = self._copied, []
        for out in copied:
            self._release(out)
        for out in tuple(self._by_job.values()):
            late = now - out.touched_s >= self._timeout_s
            if late and (out.finished or out.next is not None):
                self._withdraw(
                    out, f"no sign of life from a decode server in {self._timeout_s:g} s"
                )

    def wants_step(self) -> bool:
        """See `Capability.wants_step`: reports of the worker half come with steps only."""
        return bool(self._by_job or self._outbox)

    def plan_work(self, batch: Batch) -> PrefillWork | None:
        """See `Capability.plan_work`."""
        if not self.wants_step():
            return None
        for out in self._by_job.values():
            self._plan_pages(out)
        work, self._outbox = tuple(self._outbox), []
        return work

    def on_result(self, batch: Batch, report: Any) -> None:
        """See `Capability.on_result`."""
        for piece in batch.slices if self._by_rid else ():
            out = self._by_rid.get(piece.req.rid)
            if out is not None:
                out.ready = max(out.ready, piece.stop)
        for event in report or ():
            self._on_event(event)

    # ---- requests

    def on_arrival(self, req: Req) -> None:
        """See `Capability.on_arrival`."""
        request = req.request
        if not isinstance(request, GenerateRequest) or request.bootstrap is None:
            return
        room = request.bootstrap.room
        total = -(-(req.prompt_len - 1) // self._page_size)
        out = self._by_rid[req.rid] = _Outgoing(next(self._numbers), req, total, self._clock())
        if room in self._rooms:
            out.error = f"bootstrap_room {room} was used before"
            self.counts.refused += 1
            return
        self._rooms[room] = None
        if len(self._rooms) > USED_ROOMS:
            self._rooms.popitem(last=False)
        self._by_job[out.job] = out
        self._outbox.append(Expose(out.job, room, prompt_digest(request)))
        self.counts.started += 1

    def gate(self, req: Req) -> Verdict:
        """See `Capability.gate`."""
        out = self._by_rid.get(req.rid)
        if out is not None and out.error:
            raise RequestError(out.error, param="bootstrap_room")
        return Verdict.READY

    def on_start(self, piece: Slice) -> None:
        """See `Capability.on_start`: what was computed in other memory counts no more."""
        if (out := self._by_rid.get(piece.req.rid)) is not None:
            out.ready = 0

    def on_finish(self, req: Req) -> None:
        """See `Capability.on_finish`."""
        out = self._by_rid.get(req.rid)
        if out is None:
            return
        out.finished, out.touched_s = True, self._clock()
        if out.error:
            del self._by_rid[req.rid]
        elif req.finish is not None and req.finish.type == "abort":
            self._withdraw(out, req.finish.message or "the request was aborted")

    def holds(self, req: Req) -> bool:
        """See `Capability.holds`: until the last page was copied to host memory."""
        return req.rid in self._by_rid

    # ---- inside

    def _plan_pages(self, out: _Outgoing) -> None:
        """Have copied what can be sent now."""
        kv = out.req.kv
        if out.next is None or out.sent or kv is None:
            return
        whole = out.ready >= out.req.prompt_len - 1
        stop = out.total if whole else min(out.total, out.ready // self._page_size)
        room = (self._max_staged_bytes - self._staged) // self._page_bytes
        room = room if self._staged else max(1, room)
        stop = min(stop, out.next + max(0, room))
        last = whole and stop >= out.total
        if stop <= out.next and not last:
            return
        pages = tuple(kv.pages[out.next : stop].tolist())
        self._outbox.append(SendPages(out.job, out.next, pages, last))
        size = len(pages) * self._page_bytes
        out.staged += size
        self._staged += size
        out.next, out.sent = max(out.next, stop), last
        if last:
            self._copied.append(out)

    def _on_event(self, event: Asked | Sent | Over) -> None:
        out = self._by_job.get(event.job)
        if out is None:
            return
        out.touched_s = self._clock()
        match event:
            case Asked(first=first):
                out.next = min(first, out.total)
            case Sent(num_bytes=size):
                out.staged -= size
                self._staged -= size
                self.counts.num_bytes += size
            case Over(error=error):
                self._end(out, error)

    def _end(self, out: _Outgoing, error: str) -> None:
        """The worker half knows the job no more."""
        del self._by_job[out.job]
        self._staged -= out.staged
        if error:
            self.counts.failed += 1
            logger.warning("KV of request %s was not sent: %s", out.req.rid, error)
        else:
            self.counts.done += 1
        self._release(out)

    def _withdraw(self, out: _Outgoing, reason: str) -> None:
        self._outbox.append(Withdraw(out.job, reason))
        out.next, out.sent = None, True
        out.touched_s = self._clock()
        self._release(out)

    def _release(self, out: _Outgoing) -> None:
        """The pages of the request are not needed any more."""
        assert self._port is not None
        if self._by_rid.get(out.req.rid) is out:
            del self._by_rid[out.req.rid]
            self._port.release(out.req.rid)
