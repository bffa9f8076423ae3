"""Ends requests - finished, aborted, rejected or timed out - and frees their memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, TokenOutput
from sylvan.runtime.core.req import Phase, Req
from sylvan.runtime.sched.capability import Hooks
from sylvan.runtime.sched.outputs import buffered_outputs, output, refusal, text_may_end_earlier
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.statistics import Statistics
from sylvan.utils.clock import Clock


class Lifecycle:
    """Ends requests, and collects outputs for their clients.

    Attributes:
        outbox: Outputs not emitted yet.
    """

    def __init__(
        self,
        requests: RequestTable,
        planner: Planner,
        hooks: Hooks,
        statistics: Statistics,
        clock: Clock,
    ) -> None:
        self.outbox: list[TokenOutput] = []
        self._requests, self._planner, self._hooks = requests, planner, hooks
        self._statistics, self._clock = statistics, clock
        self._ended: list[str] = []

    @property
    def has_ended(self) -> bool:
        """Whether requests ended that the executor still holds."""
        return bool(self._ended)

    def take_ended(self) -> tuple[str, ...]:
        """Return the requests that ended since the last call, for the executor to drop."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def flush(self, emit: Callable[[Sequence[TokenOutput]], None]) -> None:
        """Emit the outputs collected so far."""
        if self.outbox:
            outputs, self.outbox = self.outbox, []
            emit(outputs)

    def collect_buffered(self) -> None:
        """Put the buffered tokens of unfinished requests into the outbox."""
        self.outbox += buffered_outputs(self._requests.all_live())

    def finish(self, req: Req, finish: Finish) -> None:
        """End `req` after its last token; free its memory once nothing needs it."""
        req.finish = finish
        self._requests.end(req)
        self._ended.append(req.rid)
        self._statistics.on_finish(req, self._clock())
        self._hooks.on_finish(req)
        if text_may_end_earlier(req) and req.phase is not Phase.LOADING:
            self._requests.move(req, Phase.CLOSING)
        else:
            self.free(req)

    def abort(self, rid: str, finish: Finish) -> None:
        """End a request in any phase; unknown rids are ignored."""
        if req := self._requests.live(rid):
            self.finish(req, finish)
            self.outbox.append(output(req, self._clock()))
        if req := self._requests.closing.get(rid):
            self.free(req)

    def abort_all(self, finish: Finish) -> None:
        """End all requests that have not ended yet."""
        for req in (*self._requests.all_live(), *self._requests.closing.values()):
            self.abort(req.rid, finish)

    def refuse(self, req: Req, error: RequestError) -> None:
        """Fail a running request that a capability rejected; emit its earlier tokens first."""
        self.finish(req, refusal(error))

    def forget(self, rids: Sequence[str]) -> None:
        """Let the executor drop these requests, which will start over."""
        self._ended += rids

    def free(self, req: Req) -> None:
        """Free the memory of an ended request, unless a capability holds it."""
        if req.kv is not None and self._hooks.holds(req):
            self._requests.move(req, Phase.HELD)
        else:
            self.end(req)

    def end(self, req: Req) -> None:
        """Free everything that `req` owns."""
        self._requests.move(req, Phase.ENDED)
        if req.kv is not None:
            self._planner.drop(req)


class Deadlines:
    """A heap of times at which to check requests; ended requests stay in it until then."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int, str]] = []

    @property
    def next_s(self) -> float:
        """The earliest time."""
        return self._moments[0][0] if self._moments else math.inf

    def add(self, req: Req, now_s: float, limits_s: Iterable[float | None]) -> None:
        """Schedule a check of `req` after each limit that is set."""
        for seconds in limits_s:
            if seconds is not None:
                heapq.heappush(self._moments, (now_s + seconds, req.order, req.rid))

    def due(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Yield requests (arrival number, rid) that are due, once per limit."""
        while self._moments and self._moments[0][0] <= now_s:
            _, order, rid = heapq.heappop(self._moments)
            yield order, rid
