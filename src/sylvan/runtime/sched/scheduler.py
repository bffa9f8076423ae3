"""The control loop: choose a batch, launch it, process the results of earlier ones."""

from __future__ import annotations

import logging
from typing import Literal

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import Finish, SchedulerLoad
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.req import Batch, Phase, Req
from sylvan.runtime.core.step import PageCopy
from sylvan.runtime.sched.admission import refuse_oversized
from sylvan.runtime.sched.capability import Capability, Hooks
from sylvan.runtime.sched.lifecycle import Deadlines, Lifecycle
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.lookup import Lookup
from sylvan.runtime.sched.outputs import refusal
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.pipeline import Pipeline
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.policies.api import PolicyContext
from sylvan.runtime.sched.port import Port
from sylvan.runtime.sched.queue import WaitingQueue
from sylvan.runtime.sched.skipping import Skipping
from sylvan.runtime.sched.statistics import Statistics
from sylvan.runtime.sched.step_times import StepTimes

logger = logging.getLogger(__name__)

CLIENT_ABORT = Finish(type="abort", message="aborted by the client")
QUEUE_FULL = Finish(
    type="abort", message="the queue is full, and a more urgent request came", status=503
)


class Scheduler:
    """Owns every request from `add` until its memory is freed; see `phases`.

    Not thread-safe: one thread drives it.

    Attributes:
        wants_step_soon: Whether a request waits for a report of an upcoming step.
        times: Times of steps, and the log of the last ones.
    """

    def __init__(self, deps: SchedulerDeps, limits: SchedulerLimits) -> None:
        capabilities = deps.capabilities
        lookup = Lookup(deps.cache, Hooks(capabilities))
        self.policy = deps.policy(
            PolicyContext(
                cached_tokens=lookup.cached_tokens,
                likely_hits=lookup.likely_hits,
                clock=deps.clock,
                seed=deps.seed,
                inflight=limits.inflight,
                tenant_weights=deps.tenant_weights,
            )
        )
        if isinstance(self.policy, Capability):  # a policy that needs the hooks of a capability
            capabilities = (*capabilities, self.policy)
        self._deps, self._limits, self._lookup = deps, limits, lookup
        self._hooks = Hooks(capabilities)
        self.wants_step_soon = self._hooks.wants_step_soon
        self.waiting = WaitingQueue(self.policy, deps.clock, limits.age_limit_s)
        self._requests = RequestTable(self.waiting)
        self.running = self._requests.running
        self._planner = Planner(deps, limits, self._requests, lookup, self._hooks)
        self._statistics = statistics = Statistics()
        self._lifecycle = lifecycle = Lifecycle(
            self._requests, self._planner, self._hooks, statistics, deps.clock
        )
        self.times = times = StepTimes(deps.clock, self._requests)
        self._pipeline = Pipeline(deps, self._hooks, self._planner, lifecycle, statistics, times)
        self.port = Port(self._requests, self._planner, self._pipeline, lifecycle, self._hooks)
        followed = capabilities or self.waiting.pacing
        self.skipping = Skipping(
            self._requests,
            self._planner,
            self._pipeline,
            lifecycle,
            deps.cache,
            allowed=limits.inflight == 1 and not followed,
        )
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._paused = False
        for capability in capabilities:
            capability.attach(self.port)

    # ---- adding and ending requests

    def add(self, request: GenerateRequest | EmbedRequest) -> None:
        """Queue a request; if the queue is full, it may replace one of lower priority.

        Raises:
            RequestError: it can never fit into memory, or its rid is in use.
            CapacityError: the queue is full, and contains no less urgent request.
        """
        self._hooks.on_call("add", request)
        if request.rid in self._requests:
            raise RequestError(f"rid {request.rid!r} is in use", param="rid")
        yields = None
        if len(self.waiting) >= self._limits.max_waiting_reqs:
            yields = self.waiting.least_urgent(below=request.priority)
            if yields is None:
                raise CapacityError(f"{len(self.waiting)} requests wait already; try again later")
        refuse_oversized(request, self._deps.cache, whole_prompts=self._limits.whole_prompts)
        if yields is not None:
            self._lifecycle.abort(yields.rid, QUEUE_FULL)
        now = self._deps.clock()
        self._arrivals += 1
        req = Req(request, arrived_s=now, order=self._arrivals)
        self._lookup.key(req)  # compute it now; a step may need the keys of all waiting requests
        self._requests.add(req)
        self._hooks.on_arrival(req)
        limits = [request.deadline_s, self._limits.queue_timeout_s]
        self._deadlines.add(req, now, limits)

    def abort(self, rid: str, finish: Finish = CLIENT_ABORT) -> None:
        """End a request in any phase; unknown rids are ignored."""
        self._hooks.on_call("abort", rid, finish)
        self._lifecycle.abort(rid, finish)

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> None:
        """End all requests that have not ended yet."""
        self._hooks.on_call("abort_all", finish)
        self._lifecycle.abort_all(finish)

    def stop_at(self, rid: str, num_tokens: int, matched: str | None) -> None:
        """End `rid` after `num_tokens` outputs, where the detokenizer found a stop string.

        `matched` None confirms that an ended request contains no stop string.
        """
        self._hooks.on_call("stop_at", rid, num_tokens, matched)
        live = self._requests.live(rid)
        req = live or self._requests.closing.get(rid)
        if req is None:
            return
        if matched is not None:
            req.tokens.truncate(req.prompt_len + num_tokens)
            req.computed = min(req.computed, len(req.tokens))
            if live:
                self._lifecycle.finish(req, Finish(type="stop", matched=matched))
        if req.phase is Phase.CLOSING:
            self._lifecycle.free(req)

    # ---- steps

    def step(self) -> bool:
        """Run one iteration; False if there was nothing to do."""
        if not self._hooks.observed:
            return self._step()
        self._hooks.on_call("step")
        try:
            return self._step()
        finally:
            self._hooks.on_step_end()

    def _step(self) -> bool:
        now, hooks = self._deps.clock(), self._hooks
        if self._deadlines.next_s <= now or self._requests.loading:
            self._expire(now)
        completed, pipeline = False, self._pipeline
        while len(pipeline.inflight) >= self._limits.inflight:
            completed = pipeline.complete_oldest()
        if hooks.polls:
            hooks.poll()
        batch = Batch(()) if self._paused else self._next_batch()
        if self._planner.started or hooks.watches_batches:
            hooks.launch(batch, self._planner.started)
        needed = batch.slices or batch.ended or self._deps.executor.caps.lockstep
        if needed or hooks.wants_step():
            pipeline.launch(batch)
        elif pipeline.inflight:
            completed = pipeline.complete_oldest()
        elif not len(self._requests):
            self._planner.admission.on_idle()
            self.times.nothing_to_do()
        self._lifecycle.flush(self._deps.emit)
        return completed or bool(batch.slices)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> int:
        """Stop scheduling; return the number of affected requests."""
        self._hooks.on_call("pause", mode)
        self._paused = True
        while self._pipeline.inflight:
            self._pipeline.complete_oldest()
        count = len(self._requests)
        if mode == "abort":
            self._lifecycle.abort_all(
                Finish(type="abort", message="generation was paused", status=503)
            )
        if mode == "retract":
            for req in tuple(self.running):
                self._planner.retract(req)
        self._lifecycle.flush(self._deps.emit)
        return count

    def resume(self) -> None:
        """Continue after `pause`."""
        self._hooks.on_call("resume")
        self._paused = False

    def flush_outputs(self) -> None:
        """Emit the buffered tokens of unfinished requests."""
        self._lifecycle.collect_buffered()
        self._lifecycle.flush(self._deps.emit)

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while requests are alive."""
        self._hooks.on_call("flush_cache")
        if len(self._requests) or self._requests.closing or self._requests.held:
            return False
        self._deps.cache.clear()
        return True

    @property
    def holds_kv(self) -> bool:
        """Whether KV is in transfer or held for one, so that `forget_kv` has to wait."""
        return bool(self._requests.loading or self._requests.held)

    def forget_kv(self) -> None:
        """Discard all computed KV, so that requests recompute it.

        Call it after `pause`, and not while `holds_kv`.
        """
        self._hooks.on_call("forget_kv")
        assert not self._pipeline.inflight
        assert not self.holds_kv
        for req in tuple(self.running):
            self._planner.retract(req)
        for req in tuple(self._requests.closing.values()):
            self._lifecycle.end(req)  # its client has all outputs; only its memory was kept
        self._deps.cache.clear()

    def audit(self) -> int:
        """Check the owner of every page, and reclaim pages without one.

        Returns the number of leaked pages: 0 unless there is a bug. No request is affected.
        """
        found = self._deps.cache.audit([r.kv for r in self._requests.with_memory() if r.kv])
        if found.total:
            self._hooks.on_call("audit")
            logger.error("leaked memory was reclaimed: %s", found)
            self._statistics.repairs += found
        return found.total

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do until a request arrives or a load completes."""
        lives = self.running or len(self.waiting) or self._requests.loading
        steps = self._pipeline.inflight or self._lifecycle.has_ended
        return not (lives or steps or self._hooks.busy)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        return self._lookup.cached_tokens(req)

    def load(self) -> SchedulerLoad:
        """Counts for health checks, balancing and metrics."""
        return self._statistics.load(self._requests, self._deps.cache, self._planner, self.times)

    # ---- inside

    def _next_batch(self) -> Batch:
        planner = self._planner
        self.times.planning()
        slices = planner.plan()
        while planner.refused:
            rid, error = planner.refused.popitem()
            self._lifecycle.abort(rid, refusal(error))
        self._statistics.computed += planner.planned_tokens
        self._statistics.steps += bool(slices)
        copies = self._deps.cache.take_copies()
        ended = self._lifecycle.take_ended()
        page_copies = tuple(PageCopy(*copy) for copy in copies) if copies else ()
        return Batch(slices, page_copies, ended, planner.num_decodes, planner.growth)

    def _expire(self, now: float) -> None:
        if self._requests.loading:
            self.port.expire(now, self._limits.load_timeout_s)
        for order, rid in self._deadlines.due(now):
            req = self._requests.live(rid)
            if req is None or req.order != order:
                continue
            deadline = req.request.deadline_s
            late = deadline is not None and now - req.arrived_s >= deadline
            if late or not req.started_s:
                message = f"not done after {now - req.arrived_s:.1f} s"
                self._lifecycle.abort(rid, Finish(type="abort", message=message, status=503))
