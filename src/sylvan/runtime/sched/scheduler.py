"""The control loop: choose the next batch, launch it, take in the results of earlier ones."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Literal

from sylvan.protocol.errors import (
    CapacityError,
    DeviceMemoryError,
    ExecutorError,
    RequestError,
)
from sylvan.protocol.messages import Finish, Load, TokenOutput
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.req import Batch, Phase, Req, Slice
from sylvan.runtime.core.step import PageCopy, SliceOutput, StepResult
from sylvan.runtime.executor.api import Pending
from sylvan.runtime.sched.admission import refuse_oversized
from sylvan.runtime.sched.capability import Capability, Hooks
from sylvan.runtime.sched.deadlines import Deadlines
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.lookup import Lookup
from sylvan.runtime.sched.outputs import (
    accept_plain,
    buffered_outputs,
    finish_reason,
    head,
    output,
    refusal,
    text_may_end_earlier,
)
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.plan_builder import PlanBuilder
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.policies.api import PolicyContext
from sylvan.runtime.sched.port import Port
from sylvan.runtime.sched.queue import WaitingQueue
from sylvan.runtime.sched.shortage import take_back
from sylvan.runtime.sched.statistics import Statistics

logger = logging.getLogger(__name__)

CLIENT_ABORT = Finish(type="abort", message="aborted by the client")


class Scheduler:
    """Owns every request from `add` until its memory is free; see `phases` for its life.

    Not thread-safe: one thread drives it.
    """

    def __init__(self, parts: Parts, limits: Limits) -> None:
        capabilities = parts.capabilities
        lookup = Lookup(parts.cache, Hooks(capabilities))
        self.policy = parts.policy(
            PolicyContext(
                cached_tokens=lookup.cached_tokens,
                likely_hits=lookup.likely_hits,
                clock=parts.clock,
                seed=parts.seed,
                inflight=limits.inflight,
                tenant_weights=parts.tenant_weights,
            )
        )
        if isinstance(self.policy, Capability):  # a policy that follows what it ordered
            capabilities = (*capabilities, self.policy)
        self._parts, self._limits, self._lookup = parts, limits, lookup
        self._hooks = Hooks(capabilities)
        self.waiting = WaitingQueue(self.policy, parts.clock, limits.age_limit_s)
        self._requests = RequestTable(self.waiting)
        self.running = self._requests.running
        self._planner = Planner(parts, limits, self._requests, lookup, self._hooks)
        self._builder = PlanBuilder(parts.executor.caps.max_running_reqs)
        self.port = Port(
            self._requests, self._planner, self._hooks, self._end, limits.load_timeout_s
        )
        self._inflight: deque[tuple[Batch, Pending]] = deque()
        self._outbox: list[TokenOutput] = []
        self._ended: list[str] = []
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._paused = False
        self._statistics = Statistics()
        for capability in capabilities:
            capability.attach(self.port)

    # ---- requests come and go

    def add(self, request: GenerateRequest | EmbedRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never fit into memory, or its rid is taken.
            CapacityError: the queue is full.
        """
        self._hooks.on_call("add", request)
        if request.rid in self._requests:
            raise RequestError(f"rid {request.rid!r} is in use", param="rid")
        if len(self.waiting) >= self._limits.max_waiting_reqs:
            raise CapacityError(f"{len(self.waiting)} requests wait already; try again later")
        refuse_oversized(request, self._parts.cache.total_tokens)
        now = self._parts.clock()
        self._arrivals += 1
        req = Req(request, arrived_s=now, order=self._arrivals)
        self._lookup.key(req)  # now, rather than of all that wait in one step
        self._requests.add(req)
        limits = [request.deadline_s, self._limits.queue_timeout_s]
        self._deadlines.add(req, now, limits)

    def abort(self, rid: str, finish: Finish = CLIENT_ABORT) -> None:
        """End a request in whatever phase it is; unknown rids are ignored."""
        self._hooks.on_call("abort", rid, finish)
        self._abort(rid, finish)

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> None:
        """End all requests that have not ended yet."""
        self._hooks.on_call("abort_all", finish)
        self._abort_all(finish)

    def stop_at(self, rid: str, num_tokens: int, matched: str | None) -> None:
        """The text of `rid` ends after `num_tokens` outputs; the client knows that already.

        `matched` None confirms that no stop was found in all of a request that has ended.
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
                self._finish(req, Finish(type="stop", matched=matched))
        if req.phase is Phase.CLOSING:
            self._free(req)

    # ---- steps

    def step(self) -> bool:
        """Run one iteration; False if there was nothing to do."""
        self._hooks.on_call("step")
        try:
            return self._step()
        finally:
            self._hooks.on_step_end()

    def _step(self) -> bool:
        self._hooks.poll()
        self._expire()
        completed = False
        while len(self._inflight) >= self._limits.inflight:
            completed = self._process_result()
        batch = Batch(()) if self._paused else self._next_batch()
        self._hooks.launch(batch, self._planner.started)
        if batch.slices or batch.ended or self._parts.executor.caps.lockstep:
            self._launch(batch)
        elif self._inflight:
            completed = self._process_result()
        elif not len(self._requests):
            self._planner.admission.on_idle()
        self._flush()
        return completed or bool(batch.slices)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> int:
        """Stop scheduling; returns how many requests are affected."""
        self._hooks.on_call("pause", mode)
        self._paused = True
        while self._inflight:
            self._process_result()
        count = len(self._requests)
        if mode == "abort":
            self._abort_all(Finish(type="abort", message="generation was paused", status=503))
        if mode == "retract":
            for req in tuple(self.running):
                self._planner.retract(req)
        self._flush()
        return count

    def resume(self) -> None:
        """Continue after `pause`."""
        self._hooks.on_call("resume")
        self._paused = False

    def flush_outputs(self) -> None:
        """Emit the buffered tokens of unfinished requests."""
        self._outbox += buffered_outputs(self._requests.all_live())
        self._flush()

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while requests are alive."""
        self._hooks.on_call("flush_cache")
        if len(self._requests) or self._requests.closing or self._requests.held:
            return False
        self._parts.cache.clear()
        return True

    def audit(self) -> int:
        """Check that all memory has the owner it should have; take back what has none.

        Returns how much was lost: always 0, but for a bug of ours, which costs nobody a request.
        """
        found = self._parts.cache.audit([r.kv for r in self._requests.with_memory() if r.kv])
        if found.total:
            self._hooks.on_call("audit")
            logger.error("memory was lost and is taken back: %s", found)
            self._statistics.repairs += found
        return found.total

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do until a request arrives or a load completes."""
        requests = self._requests
        busy = self.running or len(self.waiting) or requests.loading
        return not (busy or self._inflight or self._ended)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        return self._lookup.cached_tokens(req)

    def load(self) -> Load:
        """Counts for health checks, balancing and metrics."""
        cache, retractions = self._parts.cache, self._planner.retractions
        return self._statistics.load(self._requests, cache, retractions)

    # ---- inside

    def _next_batch(self) -> Batch:
        slices = self._planner.plan()
        while self._planner.refused:
            rid, error = self._planner.refused.popitem()
            self._abort(rid, refusal(error))
        self._statistics.computed += self._planner.planned_tokens
        self._statistics.steps += bool(slices)
        ended, self._ended = tuple(self._ended), []
        copies = tuple(PageCopy(*copy) for copy in self._parts.cache.take_copies())
        return Batch(slices, copies, ended, self._planner.decodes, self._planner.grown)

    def _launch(self, batch: Batch) -> None:
        plan = self._builder.build(batch, self._hooks.plan_work(batch))
        self._hooks.on_plan(plan)
        self._inflight.append((batch, self._parts.executor.launch(plan)))

    def _process_result(self) -> bool:
        """Take in the result of the oldest step in flight; whether it computed anything."""
        batch, pending = self._inflight.popleft()
        try:
            result = pending.wait()
        except ExecutorError as error:
            self._hooks.on_completed(error)
            self._fail(batch, error)
            return True
        self._hooks.on_completed(result)
        now = self._parts.clock()
        self._hooks.on_result(batch, result)
        self._accept_all(batch.slices, result, now)
        self._planner.step_size.on_step()
        return bool(batch.slices)

    def _accept_all(self, pieces: Sequence[Slice], result: StepResult, now: float) -> None:
        if self._hooks.follows_tokens:
            left = [*zip(pieces, result.outputs, strict=True)]
        else:
            left = accept_plain(pieces, result, self._outbox)
            self._statistics.generated += len(pieces) - len(left)
        for piece, out in left:
            self._accept(piece, out, now)

    def _fail(self, batch: Batch, error: ExecutorError) -> None:
        """The KV of a failed step cannot be trusted, nor what was shared of it."""
        if isinstance(error, DeviceMemoryError) and self._planner.step_size.shrink(batch):
            logger.warning("a step did not fit; smaller ones follow: %s", error)
            later = [launched for launched, _ in self._inflight]
            self._ended += take_back(batch, later, self._planner.retract)
        else:
            logger.error("step failed; its requests are ended", exc_info=error)
            for piece in batch.slices:
                piece.req.pending -= piece.samples
                piece.req.computed = 0
                reason = Finish(type="abort", message=str(error), status=500)
                self._abort(piece.req.rid, reason)
        self._parts.cache.clear()

    def _accept(self, piece: Slice, out: SliceOutput, now: float) -> None:
        """Take in what one slice brought."""
        req = piece.req
        if piece.samples:
            req.pending -= 1
        if piece.draft and req.kv:  # rejected guesses have no place in the cache
            guesses, accepted = len(piece.draft.tokens), out.num_accepted
            req.computed -= guesses - accepted
            self._statistics.on_verified(req, guesses, accepted)
        if req.finish:
            return  # it ended while this was in flight
        if out.error:
            self._abort(req.rid, Finish(type="abort", message=out.error, status=out.status))
            return
        if not piece.samples:
            return  # a chunk that is not the last
        if not req.first_token_s:
            req.first_token_s = now
            self._statistics.cached += req.cached_tokens
        if isinstance(req.request, EmbedRequest):
            fields = self._hooks.output_fields(req)
            self._finish(req, Finish(type="stop"))
            self._outbox.append(output(req, now, **fields))
        else:
            if len(out.token_ids) > 1 and not piece.draft:
                self._void_later_samples(req)
            self._accept_tokens(req, out, now)

    def _accept_tokens(self, req: Req, out: SliceOutput, now: float) -> None:
        tokens, finish = out.token_ids, Finish(type="stop") if out.ended else None
        if req.max_tokens == req.prompt_len:  # prefill only: nothing is given out
            tokens, finish = (), Finish(type="length", length=0)
        for count, token in enumerate(tokens, 1):
            req.tokens.append(token)
            if found := finish_reason(req, token):
                tokens, finish = tokens[:count], found
                break
        self._statistics.generated += len(tokens)
        if self._hooks.follows_tokens:
            self._follow(req, tokens)
        fields = self._hooks.output_fields(req) if self._hooks.adds_output_fields else {}
        if finish and not req.finish:
            self._finish(req, finish)
        if req.finish or fields or req.tokens.length >= req.emit_at:
            logprobs = head(out.logprobs, len(tokens))
            self._outbox.append(output(req, now, logprobs=logprobs, **fields))

    def _void_later_samples(self, req: Req) -> None:
        """What steps in flight sample after the first of several tokens is void."""
        for batch, _ in self._inflight:
            for piece in batch.slices:
                if piece.req is req and piece.samples:
                    piece.samples = False
                    req.pending -= 1
        req.computed = min(req.computed, req.tokens.length + 1)
        self._builder.look_again()

    def _abort(self, rid: str, finish: Finish) -> None:
        if req := self._requests.live(rid):
            self._finish(req, finish)
            self._outbox.append(output(req, self._parts.clock()))
        if req := self._requests.closing.get(rid):
            self._free(req)

    def _abort_all(self, finish: Finish) -> None:
        for req in (*self._requests.all_live(), *self._requests.closing.values()):
            self._abort(req.rid, finish)

    def _finish(self, req: Req, finish: Finish) -> None:
        """`req` has its last token; its memory goes once nothing needs it."""
        req.finish = finish
        self._requests.end(req)
        self._ended.append(req.rid)
        self._statistics.on_finish(req, self._parts.clock())
        self._hooks.on_finish(req)
        if text_may_end_earlier(req) and req.phase is not Phase.LOADING:
            self._requests.move(req, Phase.CLOSING)
        else:
            self._free(req)

    def _free(self, req: Req) -> None:
        """Give back the memory of a request that has ended, unless a capability holds it."""
        if req.kv is not None and self._hooks.holds(req):
            self._requests.move(req, Phase.HELD)
        else:
            self._end(req)

    def _end(self, req: Req) -> None:
        self._requests.move(req, Phase.ENDED)
        if req.kv is not None:
            self._planner.drop(req)

    def _flush(self) -> None:
        if self._outbox:
            outputs, self._outbox = self._outbox, []
            self._parts.emit(outputs)

    def _follow(self, req: Req, tokens: Sequence[int]) -> None:
        """Tell the capabilities of new tokens; a request that one of them refuses ends alone."""
        try:
            self._hooks.on_tokens(req, tokens)
        except RequestError as error:
            self._finish(req, refusal(error))

    def _expire(self) -> None:
        now = self._parts.clock()
        self.port.expire(now)
        for order, rid in self._deadlines.due(now):
            req = self._requests.live(rid)
            if req is None or req.order != order:
                continue
            deadline = req.request.deadline_s
            late = deadline is not None and now - req.arrived_s >= deadline
            if late or not req.started_s:
                message = f"not done after {now - req.arrived_s:.1f} s"
                self._abort(rid, Finish(type="abort", message=message, status=503))
