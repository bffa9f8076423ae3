"""The control loop: choose the next batch, launch it, take in the results of earlier ones."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sylvan.protocol.errors import (
    CapacityError,
    DeviceMemoryError,
    ExecutorError,
    RequestError,
)
from sylvan.protocol.messages import Finish, Load, TokenOutput
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.audit import Repairs
from sylvan.runtime.core.req import Batch, Req, Slice, SliceOutput, StepResult
from sylvan.runtime.executor.api import Pending
from sylvan.runtime.sched.admission import refuse_oversized
from sylvan.runtime.sched.deadlines import Deadlines
from sylvan.runtime.sched.feature import Feature, Hooks
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.lookup import Lookup
from sylvan.runtime.sched.outputs import (
    PromptLogprobs,
    accept_plain,
    finish_reason,
    head,
    kept_back,
    met_targets,
    output,
    refusal,
    text_may_end_earlier,
)
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.policies.api import PolicyContext
from sylvan.runtime.sched.queue import WaitingQueue
from sylvan.runtime.sched.shortage import take_back
from sylvan.runtime.sched.states import StateKeeper

logger = logging.getLogger(__name__)

CLIENT_ABORT = Finish(type="abort", message="aborted by the client")


class Scheduler:
    """Owns every request from `add` to its last output.

    A live request is in exactly one place: waiting, running, or closing (it has ended, but whether
    its text was to end earlier is not confirmed yet). Not thread-safe: one thread drives it.
    """

    def __init__(self, parts: Parts, limits: Limits) -> None:
        self._prompt_logprobs = PromptLogprobs()
        pool_all = limits.pool_all
        self._lookup = lookup = Lookup(parts.cache, self._prompt_logprobs, pool_all=pool_all)
        policy = parts.policy(
            PolicyContext(
                cached_tokens=lookup.cached_tokens,
                likely_hits=lookup.likely_hits,
                clock=parts.clock,
                seed=parts.seed,
                inflight=limits.inflight,
                tenant_weights=parts.tenant_weights,
            )
        )
        if isinstance(policy, Feature):  # a policy that follows what it ordered
            parts = replace(parts, features=(*parts.features, policy))
        if parts.cache.states is not None:
            keeper = StateKeeper(parts.cache, parts.cache.states)
            parts = replace(parts, features=(*parts.features, keeper))
        self.policy = policy
        self.running: list[Req] = []
        self.waiting = WaitingQueue(policy, parts.clock, limits.age_limit_s)
        self._parts, self._limits = parts, limits
        self._hooks = Hooks(parts.features)
        self._planner = Planner(parts, limits, self.waiting, self.running, lookup)
        self._live: dict[str, Req] = {}
        self._closing: dict[str, Req] = {}
        self._held: dict[str, Req] = {}
        self._inflight: deque[tuple[Batch, Pending]] = deque()
        self._outbox: list[TokenOutput] = []
        self._ended: list[str] = []
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._paused = False
        self._repairs = Repairs()
        counted = ("computed", "cached", "generated", "steps", "targets", "met")
        self._totals = dict.fromkeys(counted, 0)

    # ---- requests come and go

    def add(self, request: GenerateRequest | EmbedRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never fit into memory, or its rid is taken.
            CapacityError: the queue is full.
        """
        if request.rid in self._live or request.rid in self._closing:
            raise RequestError(f"rid {request.rid!r} is in use", param="rid")
        if len(self.waiting) >= self._limits.max_waiting_reqs:
            raise CapacityError(f"{len(self.waiting)} requests wait already; try again later")
        refuse_oversized(request, self._parts.cache.total_tokens)
        now = self._parts.clock()
        self._arrivals += 1
        req = Req(request, arrived_s=now, order=self._arrivals)
        self._live[request.rid] = req
        self._lookup.key(req)  # now, rather than of all that wait in one step
        self.waiting.add(req)
        limits = [request.deadline_s, self._limits.queue_timeout_s]
        self._deadlines.add(req, now, limits)

    def abort(self, rid: str, finish: Finish = CLIENT_ABORT) -> None:
        """End a request in whatever state it is; unknown rids are ignored."""
        if req := self._live.get(rid):
            self._finish(req, finish)
            self._outbox.append(output(req, self._parts.clock()))
        if req := self._closing.pop(rid, None):
            self._release(req)

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> None:
        """End all requests."""
        for rid in (*self._live, *self._closing):
            self.abort(rid, finish)

    def stop_at(self, rid: str, num_tokens: int, matched: str | None) -> None:
        """The text of `rid` ends after `num_tokens` outputs; the client knows that already.

        `matched` None confirms that no stop was found in all of a request that has ended.
        """
        req = self._live.get(rid) or self._closing.get(rid)
        if req is None:
            return
        if matched is not None:
            req.tokens.truncate(req.prompt_len + num_tokens)
            req.computed = min(req.computed, len(req.tokens))
            if rid in self._live:
                self._finish(req, Finish(type="stop", matched=matched))
        if self._closing.pop(rid, None):
            self._release(req)

    def release(self, rid: str) -> None:
        """A feature that held the memory of a finished request lets go of it."""
        if req := self._held.pop(rid, None):
            self._planner.drop(req)

    # ---- steps

    def step(self) -> bool:
        """Run one iteration; False if there was nothing to do."""
        self._hooks.poll()
        self._expire()
        settled = False
        while len(self._inflight) >= self._limits.inflight:
            settled = self._settle()
        batch = Batch(()) if self._paused else self._next_batch()
        self._hooks.launch(batch, self._planner.started)
        if batch.slices or batch.ended or self._parts.executor.caps.lockstep:
            self._inflight.append((batch, self._parts.executor.launch(batch)))
        elif self._inflight:
            settled = self._settle()
        elif not self._live:
            self._planner.admission.on_idle()
        self._flush()
        return settled or bool(batch.slices)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> int:
        """Stop scheduling; returns how many requests are affected."""
        self._paused = True
        while self._inflight:
            self._settle()
        count = len(self._live)
        if mode == "abort":
            self.abort_all(Finish(type="abort", message="generation was paused", status=503))
        if mode == "retract":
            for req in tuple(self.running):
                self._planner.retract(req)
        self._flush()
        return count

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def tell(self) -> None:
        """Emit what is kept back of requests that nobody waits for token by token."""
        self._outbox += kept_back(self._live.values())
        self._flush()

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while requests are alive."""
        if self._live or self._closing or self._held:
            return False
        self._parts.cache.clear()
        return True

    def audit(self) -> int:
        """Check that all memory has the owner it should have; take back what has none.

        Returns how much was lost: always 0, but for a bug of ours, which costs nobody a request.
        """
        alive = [*self.running, *self._closing.values(), *self._held.values()]
        found = self._parts.cache.audit([r.kv for r in alive if r.kv])
        if found.total:
            logger.error("memory was lost and is taken back: %s", found)
            self._repairs += found
        return found.total

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do until a request arrives."""
        return not (self.running or len(self.waiting) or self._inflight or self._ended)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        return self._lookup.cached_tokens(req)

    def load(self) -> Load:
        """Counts for health checks, balancing and metrics."""
        cache = self._parts.cache
        return Load(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_used_tokens=cache.used_tokens,
            num_cached_tokens=cache.cached_tokens,
            max_total_num_tokens=cache.total_tokens,
            steps=self._totals["steps"],
            computed_tokens=self._totals["computed"],
            cached_prompt_tokens=self._totals["cached"],
            generated_tokens=self._totals["generated"],
            retractions=self._planner.retractions,
            targets_set=self._totals["targets"],
            targets_met=self._totals["met"],
            repaired_pages=self._repairs.pages,
            repaired_locks=self._repairs.locks,
            repaired_states=self._repairs.states,
        )

    # ---- inside

    def _next_batch(self) -> Batch:
        slices = self._planner.plan()
        while self._planner.refused:
            rid, error = self._planner.refused.popitem()
            self.abort(rid, refusal(error))
        self._totals["computed"] += self._planner.planned_tokens
        self._totals["steps"] += bool(slices)
        ended, self._ended = tuple(self._ended), []
        copies = self._parts.cache.take_copies()
        return Batch(slices, copies, ended, self._planner.decodes, self._planner.grown)

    def _settle(self) -> bool:
        """Take in the results of the oldest step in flight."""
        batch, pending = self._inflight.popleft()
        try:
            result = pending.wait()
        except ExecutorError as error:
            self._fail(batch, error)
            return True
        now = self._parts.clock()
        if result.tokens is not None and not self._hooks.follows:
            self._accept_each(batch.slices, result, now)
        else:
            for piece, out in zip(batch.slices, result.outputs, strict=True):
                self._accept(piece, out, now)
        self._planner.step_size.on_step()
        return bool(batch.slices)

    def _accept_each(self, pieces: Sequence[Slice], result: StepResult, now: float) -> None:
        """`_accept` for one token a slice."""
        left = accept_plain(pieces, result, self._outbox)
        self._totals["generated"] += len(pieces) - len(left)
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
                self.abort(piece.req.rid, reason)
        self._parts.cache.clear()

    def _accept(self, piece: Slice, out: SliceOutput, now: float) -> None:
        req = piece.req
        if piece.samples:
            req.pending -= 1
        if piece.draft and req.kv:  # rejected guesses have no place in the cache
            req.computed -= len(piece.draft.tokens) + 1 - len(out.token_ids)
        if req.finish:
            return  # it ended while this was in flight
        if out.error:
            self.abort(req.rid, Finish(type="abort", message=out.error, status=out.status))
            return
        if out.prompt_logprobs is not None and self._prompt_logprobs.wanted(req) is not None:
            self._prompt_logprobs.add(req, piece.start, out.prompt_logprobs)
        if not piece.samples:
            return  # a chunk that is not the last
        if not req.first_token_s:
            req.first_token_s = now
            self._totals["cached"] += req.cached_tokens
        if isinstance(req.request, EmbedRequest):
            self._finish(req, Finish(type="stop"))
            self._outbox.append(output(req, now, embedding=out.vector))
        else:
            if len(out.token_ids) > 1 and not piece.draft:
                self._forget_later(req)
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
        self._totals["generated"] += len(tokens)
        if self._hooks.follows:
            self._follow(req, tokens)
        prompt_logprobs = None
        if isinstance(req.request, GenerateRequest) and req.request.logprobs is not None:
            prompt_logprobs = self._prompt_logprobs.take(req)  # the finish forgets them
        if finish and not req.finish:
            self._finish(req, finish)
        if req.finish or prompt_logprobs or req.tokens.length >= req.tell_at:
            logprobs = head(out.logprobs, len(tokens))
            told = output(req, now, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
            self._outbox.append(told)

    def _forget_later(self, req: Req) -> None:
        """What steps in flight sample after the first of several tokens is void."""
        for batch, _ in self._inflight:
            for piece in batch.slices:
                if piece.req is req and piece.samples:
                    piece.samples = False
                    req.pending -= 1
        req.computed = min(req.computed, req.tokens.length + 1)

    def _finish(self, req: Req, finish: Finish) -> None:
        req.finish = finish
        del self._live[req.rid]
        if req.kv:
            self.running.remove(req)
        else:
            self.waiting.remove(req)
        self._ended.append(req.rid)
        self._prompt_logprobs.forget(req.rid)
        met = met_targets(req, self._parts.clock())
        self._totals["targets"] += met is not None
        self._totals["met"] += bool(met)
        self._hooks.finish(req)
        if text_may_end_earlier(req):
            self._closing[req.rid] = req
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        if req.kv is None:
            return
        if self._hooks.holds(req):
            self._held[req.rid] = req
        else:
            self._planner.drop(req)

    def _flush(self) -> None:
        if self._outbox:
            outputs, self._outbox = self._outbox, []
            self._parts.emit(outputs)

    def _follow(self, req: Req, tokens: Sequence[int]) -> None:
        """Tell the features of new tokens; a request that one of them refuses ends alone."""
        try:
            self._hooks.follow(req, tokens)
        except RequestError as error:
            self._finish(req, refusal(error))

    def _expire(self) -> None:
        now = self._parts.clock()
        for order, rid in self._deadlines.due(now):
            req = self._live.get(rid)
            if req is None or req.order != order:
                continue
            deadline = req.request.deadline_s
            late = deadline is not None and now - req.arrived_s >= deadline
            if late or not req.started_s:
                message = f"not done after {now - req.arrived_s:.1f} s"
                self.abort(rid, Finish(type="abort", message=message, status=503))
