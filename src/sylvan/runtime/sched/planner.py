"""Which tokens the next step computes.

There are no phases. A request lacks tokens (those without KV); a step gives each request some of
the tokens it lacks. Chunked prefill, mixed batches, prefix hits, preemption and speculation all
follow from that one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.types import common_prefix_len, media_divergence
from sylvan.runtime.core.req import Draft, Req, Slice
from sylvan.runtime.sched.admission import Admission
from sylvan.runtime.sched.decodes import Decodes
from sylvan.runtime.sched.feature import Feature, Verdict, overriding
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.lookup import Lookup
from sylvan.runtime.sched.policies.api import PacingPolicy
from sylvan.runtime.sched.queue import WaitingQueue
from sylvan.runtime.sched.shortage import StepSize

_priority: Callable[[Req], int] = attrgetter("priority")
MIN_SHARED_TOKENS = 32  # a shorter common start is not worth waiting for
START_COST = 12  # decodes that take the scheduler as long as starting a request
LIGHT_STEP = 400  # decodes that take it about 2 ms
MIN_STARTS = 12
AGED_TOKENS = 64  # of prompts in a step, whatever the pace, while a request has waited too long


def most_starts(num_others: int) -> int:
    """How many requests a step starts beside others, which wait meanwhile. The rest follow."""
    return max(MIN_STARTS, (LIGHT_STEP - num_others) // START_COST)


class Planner:
    """Moves requests between the queues, and memory to and from them."""

    def __init__(
        self,
        parts: Parts,
        limits: Limits,
        waiting: WaitingQueue,
        running: list[Req],
        lookup: Lookup,
    ) -> None:
        self.step = 0
        self.retractions = 0
        self.refused: dict[str, RequestError] = {}  # by rid; the scheduler ends and forgets them
        self.admission = Admission(limits.conservativeness)
        self.step_size = StepSize(limits.max_batch_tokens, fixed=limits.whole_prompts)
        self._parts, self._limits, self._cache = parts, limits, parts.cache
        self._waiting, self._running = waiting, running
        self._lookup = lookup
        self.started: list[Slice] = []  # by the step being planned: of requests that waited
        self.planned_tokens = 0
        features = parts.features
        self._pacing = waiting.pacing
        self._gates = overriding(features, "gate")  # of waiting requests
        self._running_gates = tuple(f for f in self._gates if f.gates_running)
        self._drafters = overriding(features, "draft")
        self._plain = not self._running_gates and not self._drafters
        self.decodes = False  # whether the slices planned last are nothing but plain decodes
        self.grown: tuple[Req, ...] | None = None  # see `Batch.grown`
        self._decodes = Decodes(parts.cache) if self._plain and limits.inflight == 1 else None
        self._slices: list[Slice] = []
        self._decoded = 0  # of those, the plainest
        self._page_size = parts.cache.page_size
        self._budget = 0
        self._chunk = 0

    def plan(self) -> tuple[Slice, ...]:
        """Choose the next step's slices: decoding first, then prompts under way, then new ones."""
        self.step += 1
        self._slices = []
        if self.started:
            self.started = []
        self._budget, self._chunk = self.step_size.tokens, self._limits.chunk_tokens
        if self._pacing is not None:
            self._chunk = min(self._chunk, self._pace(self._pacing))
        self.planned_tokens, self._decoded, self.grown = 0, 0, None
        self._make_way()
        retractions = self.retractions
        quickly = self._decode_at_once()
        for req in self._decode_each() if quickly is None else quickly:
            self._go_on(req)
        if self.retractions == retractions:
            self.admission.on_step()
            self._admit()
        self.decodes = self._decoded == len(self._slices)
        if self._decodes is None:
            return tuple(self._slices)
        slices = self._decodes.whole_step(
            self._slices, only=self.decodes and self._decoded > 0 and quickly is not None
        )
        if self._decodes.repeats:
            self.grown = self._decodes.grown
        return slices

    def _pace(self, policy: PacingPolicy) -> int:
        """How much of prompts this step may compute.

        Never nothing while a request, waiting or not, is aged: the bound on starvation.
        """
        prompts = [r for r in self._running if r.lacking > 1]
        urgent = max(map(_priority, prompts), default=None)
        if len(self._waiting):
            highest = self._waiting.highest_priority
            urgent = highest if urgent is None else max(urgent, highest)
        if urgent is None:
            return self._chunk
        tokens = policy.prompt_tokens(self._running, urgent)
        if tokens < AGED_TOKENS and (
            self._waiting.any_aged or any(map(self._waiting.is_aged, prompts))
        ):
            return AGED_TOKENS
        return tokens

    def _decode_at_once(self) -> list[Req] | None:
        """Give all that decode their slices; returns the others, or None, having done nothing."""
        if self._decodes is None or len(self._running) > self._budget:
            return None
        if (planned := self._decodes.plan(self._running)) is None:
            return None
        self._slices, others = planned
        self._decoded = self.planned_tokens = len(self._slices)
        self._budget -= self._decoded
        return others

    def _decode_each(self) -> list[Req]:
        """Give decoding requests their slices one by one; returns prompts under way."""
        prompts: list[Req] = []
        slices, extend, page_size = self._slices, self._cache.extend, self._page_size
        for req in tuple(self._running):
            start, pending = req.computed, req.pending
            known = req.tokens.length + pending
            if known - start > 1:
                prompts.append(req)
            elif known <= start or (pending and known >= req.max_tokens):
                continue  # nothing lacks, or what is in flight brings its last token
            elif (
                self._plain
                and self._budget > 0
                and start >= req.prompt_len
                and (kv := req.kv) is not None
                and (start < kv.num_pages * page_size or extend(kv, start + 1))
            ):  # `_go_on` for the plainest and most frequent case
                slices.append(Slice(req, start, start + 1, True))
                req.computed, req.pending = start + 1, pending + 1
                self._budget -= 1
                self._decoded += 1
            else:
                self._go_on(req)
        self.planned_tokens += self._decoded
        return prompts

    def drop(self, req: Req) -> None:
        """Give back the memory of `req`, sharing what of it is known and computed."""
        assert req.kv is not None
        known = min(req.computed, len(req.tokens))
        self._cache.release(
            req.kv,
            known,
            req.tokens.view(0, known),
            step=self.step,
            priority=req.request.priority,
        )
        req.kv, req.computed, req.decode = None, 0, None

    def retract(self, req: Req) -> None:
        """Take the memory of a running request; it waits until there is some again."""
        self._running.remove(req)
        req.retractions += 1
        self.retractions += 1
        self.drop(req)
        self._waiting.add(req)

    # ---- running requests

    def _go_on(self, req: Req) -> None:
        if req.kv is None or (self._running_gates and not self._may_run(req, self._running_gates)):
            return
        want, draft = self._want(req)
        guesses = len(draft.tokens) if draft else 0
        while want and req.kv and not self._cache.extend(req.kv, req.computed + want + guesses):
            victim = self._victim()
            if victim is req and len(self._running) == 1:
                return  # memory is held elsewhere for a moment
            self.admission.on_retract(self._running)
            self.retract(victim)
        if want and req.kv:
            self._take(req, want, draft)

    def _want(self, req: Req) -> tuple[int, Draft | None]:
        """How many tokens to compute, and guesses to verify after them."""
        room = self._budget if req.lacking == 1 else min(self._budget, self._chunk)
        if self._is_whole(req):
            return (req.lacking if req.lacking <= room or not self._slices else 0), None
        if req.pending or req.lacking >= room:
            return min(req.lacking, room), None
        draft = next((d for f in self._drafters if (d := f.draft(req))), None)
        if draft and len(draft.tokens) > room - req.lacking:
            draft = None
        return req.lacking, draft

    def _victim(self) -> Req:
        """Who gives way: least urgent, then fewest outputs, then longest prompt, then newest."""
        busy = {piece.req.order for piece in self._slices}
        free = [r for r in self._running if r.order not in busy]
        return min(free, key=lambda r: (r.request.priority, r.num_outputs, -r.prompt_len, -r.order))

    # ---- waiting requests

    def _admit(self) -> None:
        if not len(self._waiting) or self._budget <= 0 or self._chunk <= 0:
            return
        if len(self._running) >= self._limits.max_running_reqs:
            return
        reserved = self.admission.reserved_tokens(self._running)
        leaders = [r for r in self._running if r.computed < r.prompt_len]
        most = most_starts(len(self._slices)) if self._slices else self._limits.max_running_reqs
        for req in self._waiting.candidates():
            if self._budget <= 0 or self._chunk <= 0 or len(self.started) >= most:
                return
            if req.pending or not self._may_run(req, self._gates):
                continue
            if leaders and self._should_follow(req, leaders):
                continue
            if not self._make_room(req, reserved) or not self._start(req):
                return
            reserved += self.admission.expected_outputs(req)
            if req.computed < req.prompt_len:
                leaders.append(req)

    def _make_way(self) -> None:
        """Retract for the most urgent request that waits, before anybody gets a slice."""
        if not len(self._waiting) or not self._running or self._chunk <= 0:
            return
        if not self._may_preempt(self._waiting.highest_priority):
            return
        urgent = max(self._waiting, key=lambda r: (r.request.priority, -r.order))
        if not urgent.pending and self._may_run(urgent, self._gates):
            self._make_room(urgent, self.admission.reserved_tokens(self._running))

    def _make_room(self, req: Req, reserved: float) -> bool:
        """Whether `req` fits beside those running, retracting less urgent ones if need be."""
        need = req.num_tokens + self.admission.expected_outputs(req) + self._cache.page_size
        while not self._fits(req, need, reserved):
            if not self._may_preempt(req.priority):
                return False
            busy = {piece.req.order for piece in self._slices}
            less_urgent = [r for r in self._running if self._yields(r, req) and r.order not in busy]
            if not less_urgent:
                return False
            victim = min(less_urgent, key=lambda r: (r.request.priority, -r.order))
            reserved -= self.admission.expected_outputs(victim)
            self.retract(victim)
        return True

    def _fits(self, req: Req, need: float, reserved: float) -> bool:
        if not self._running:
            return True
        if len(self._running) >= self._limits.max_running_reqs:
            return False
        free = self._cache.available_tokens - reserved
        return need <= free or need - self._lookup.cached_tokens(req) <= free

    def _yields(self, running: Req, to: Req) -> bool:
        threshold = self._limits.preemption_threshold
        return threshold is not None and to.request.priority - running.request.priority >= threshold

    def _may_preempt(self, priority: int) -> bool:
        """Whether any running request yields to one of that priority."""
        threshold = self._limits.preemption_threshold
        return threshold is not None and priority - min(map(_priority, self._running)) >= threshold

    def _should_follow(self, req: Req, leaders: Sequence[Req]) -> bool:
        """Whether a running prompt is computing a start that `req` shares and does not have yet."""
        if self._waiting.is_aged(req) or not isinstance(req.request, GenerateRequest):
            return False
        key, known = self._lookup.key(req), None
        shortest = max(MIN_SHARED_TOKENS, self._cache.page_size)
        for leader in leaders:
            if leader.kv is None or leader.kv.key.namespace != key.namespace:
                continue
            n = min(leader.prompt_len, req.prompt_len)
            shared = common_prefix_len(leader.tokens.view(0, n), req.tokens.view(0, n))
            theirs = leader.kv.key.media
            if key.media or theirs:
                shared = media_divergence(theirs, key.media, 0, shared)
            if shared < shortest:
                continue
            known = self._lookup.cached_tokens(req) if known is None else known
            if shared - known >= shortest:
                return True
        return False

    def _start(self, req: Req) -> bool:
        kv = self._cache.acquire(
            self._lookup.key(req),
            self._lookup.limit(req),
            step=self.step if self._limits.share_in_batch else 0,
            priority=req.request.priority,
        )
        req.kv, req.computed = kv, kv.cached
        want = self._want(req)[0]
        enough = want and (self._cache.states is None or kv.state is not None)
        if not enough or not self._cache.extend(kv, req.computed + want):
            self._cache.release(kv, 0, req.tokens.view(0, 0), step=self.step)
            req.kv, req.computed = None, 0
            return False
        if not req.started_s:
            req.started_s = self._parts.clock()
            req.cached_tokens = min(kv.cached, req.prompt_len)
        self._waiting.remove(req)
        self._running.append(req)
        self._take(req, want, None)
        self.started.append(self._slices[-1])
        return True

    # ---- both

    def _take(self, req: Req, count: int, draft: Draft | None) -> None:
        """Mark the next `count` tokens of `req` as scheduled and share its prompt so far."""
        assert req.kv is not None
        stop = req.computed + count
        piece = Slice(
            req, req.computed, stop, stop == req.num_tokens, draft, whole=self._is_whole(req)
        )
        is_prompt = req.computed < req.prompt_len
        guesses = len(draft.tokens) if draft else 0
        req.computed, req.pending = stop + guesses, req.pending + piece.samples
        self._slices.append(piece)
        self.planned_tokens += count
        self._budget -= count + guesses
        self._chunk -= count if count > 1 else 0
        if is_prompt and self._limits.share_in_batch:
            done = min(stop, len(req.tokens))
            self._cache.publish(
                req.kv,
                done,
                req.tokens.view(0, done),
                step=self.step,
                priority=req.request.priority,
            )

    def _may_run(self, req: Req, gates: tuple[Feature, ...]) -> bool:
        for feature in gates:
            try:
                verdict = feature.gate(req)
            except RequestError as error:
                self.refused[req.rid] = error
                return False
            if verdict is Verdict.WAIT or (verdict is Verdict.SETTLE and req.pending):
                return False
        return True

    def _is_whole(self, req: Req) -> bool:
        return self._limits.whole_prompts and isinstance(req.request, EmbedRequest)
