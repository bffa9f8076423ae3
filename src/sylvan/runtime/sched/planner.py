"""Decides which tokens the next step computes.

There are no prefill and decode phases. Every request has tokens without KV; a step computes some of
them for each. Chunked prefill, mixed batches, prefix hits, preemption and speculation all follow
from that one rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.core.req import NEVER, NO_GROWTH, Draft, Growth, Phase, Req, Slice
from sylvan.runtime.sched.admission import Admission, Preemption, max_starts
from sylvan.runtime.sched.capability import Hooks, Verdict
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits, StepSize
from sylvan.runtime.sched.lookup import Lookup
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.policies.api import PacingPolicy
from sylvan.runtime.sched.queue import WaitingQueue

AGED_TOKENS = 64  # minimum prompt tokens per step while a request has waited too long
MIN_SHARED_TOKENS = 32  # a shorter shared prefix is not worth waiting for


class Planner:
    """Moves requests between phases, and allocates and frees their memory."""

    def __init__(
        self,
        deps: SchedulerDeps,
        limits: SchedulerLimits,
        requests: RequestTable,
        lookup: Lookup,
        hooks: Hooks,
    ) -> None:
        self.step = 0
        self.retractions = 0
        self.retracted_inputs = self.retracted_outputs = 0  # tokens of retracted requests
        self.refused: dict[str, RequestError] = {}  # by rid; the scheduler fails them
        self.admission = Admission(limits.conservativeness)
        self.step_size = StepSize(limits.max_batch_tokens, fixed=limits.whole_prompts)
        self._deps, self._limits, self._cache = deps, limits, deps.cache
        self._requests, self._lookup, self._hooks = requests, lookup, hooks
        self._waiting, self._running = requests.waiting, requests.running
        self._preemption = Preemption(self._running, limits.preemption_threshold)
        self.started: list[Slice] = []  # slices of requests that the step being planned starts
        self._loaded: set[Req] = set()  # loaded requests that run but have no first slice yet
        self.planned_tokens = 0
        self._pacing = self._waiting.pacing
        self._plain = False  # whether no capability gates running requests in this step
        self.num_decodes = 0  # see `Batch.num_decodes`
        self.growth: Growth | None = None  # see `Batch.growth`
        one_step = limits.inflight == 1 and not hooks.gates_running
        self._decodes = Decodes(deps.cache) if one_step else None
        self._slices: list[Slice] = []
        self._page_size = deps.cache.page_size
        self._max_chunk = min(limits.chunk_tokens, deps.cache.max_step_tokens)
        self._budget = 0
        self._chunk = self._first_chunk = 0
        self._drafted = self._paths = 0  # of this step
        self._max_sampled_rows = deps.executor.caps.max_samples or NEVER
        self._stages = deps.executor.caps.stages

    def plan(self) -> tuple[Slice, ...]:
        """Choose the next step's slices: decodes first, then running prompts, then new requests."""
        self.step += 1
        self._slices = []
        if self.started:
            self.started = []
        self._budget, self._chunk = self.step_size.tokens, self._max_chunk
        if self._pacing is not None:
            paced = paced_tokens(self._pacing, self._running, self._waiting)
            self._chunk = self._chunk if paced is None else min(self._chunk, paced)
        self._first_chunk = self._chunk
        self.planned_tokens, self.num_decodes, self.growth = 0, 0, None
        self._drafted = self._paths = 0
        hooks = self._hooks
        self._plain = not hooks.gates_running and not (hooks.drafts and hooks.may_draft())
        if len(self._waiting):
            self._preempt_for_urgent()
        retractions = self.retractions
        rest = self._decode_all()
        for req in self._decode_each() if rest is None else rest:
            self._schedule_running(req)
        if self.retractions == retractions:
            self.admission.on_step()
            if len(self._waiting):
                self._start_waiting()
        if self._decodes is None or rest is None:
            return tuple(self._slices)
        self.growth = self._decodes.growth
        return self._decodes.whole_step(self._slices, self.num_decodes)

    def skip(self, steps: int) -> None:
        """Account for `steps` decode steps that were not planned one by one; see `skipping`."""
        self.step += steps
        self.admission.skip(steps)
        self.step_size.skip(steps)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        return self._lookup.cached_tokens(req)

    # ---- memory

    def drop(self, req: Req) -> None:
        """Free the memory of `req`; its computed prefix stays in the cache."""
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
        """Preempt a running request: free its memory and queue it again."""
        req.retractions += 1
        self.retractions += 1
        self.retracted_inputs += req.prompt_len
        self.retracted_outputs += req.num_outputs
        self.start_again(req)

    def start_again(self, req: Req) -> None:
        """Publish the computed prefix of a running request, and queue it again."""
        self._loaded.discard(req)
        self.drop(req)
        self._requests.move(req, Phase.WAITING)

    def run_loaded(self, req: Req, num_computed: int) -> None:
        """Run a loading request, whose memory is filled, from the next step on."""
        req.computed = min(num_computed, req.num_tokens - 1)
        if req.kv is not None and not req.retractions:
            req.loaded_tokens = min(req.kv.loaded, req.cached_tokens)
            req.host_tokens = min(req.kv.from_host, req.cached_tokens - req.loaded_tokens)
        self._loaded.add(req)
        self._requests.move(req, Phase.RUNNING)

    # ---- running requests

    def _decode_all(self) -> list[Req] | None:
        """Plan all decodes at once; return the other requests, or None if that was not possible."""
        if self._decodes is None or not self._plain or self._loaded:
            return None
        if len(self._running) > self._budget:
            return None
        if (planned := self._decodes.plan(self._running)) is None:
            return None
        self._slices, others = planned
        self.num_decodes = self.planned_tokens = len(self._slices)
        self._budget -= self.num_decodes
        return others

    def _decode_each(self) -> list[Req]:
        """Plan decodes one by one; return the prompts in progress."""
        prompts: list[Req] = []
        slices, extend, page_size = self._slices, self._cache.extend, self._page_size
        quick = not (self._hooks.gates_running or self._hooks.fills or self._loaded)
        left = self._share_of_stages
        for req in tuple(self._running):
            start, pending = req.computed, req.pending
            known = req.tokens.length + pending
            if known - start > 1:
                prompts.append(req)
                continue
            if known <= start or (pending and known >= req.max_tokens):
                continue  # fully computed, or the step in flight samples its last token
            if left is not None:
                if pending or not left:
                    continue  # in another of the batches under way, or in the next one
                left -= 1
            kv = req.kv
            if not (quick and self._budget > 0 and start >= req.prompt_len and kv is not None):
                self._schedule_running(req)
                continue
            draft = self._draft(req, 1)
            fits = start < kv.num_pages * page_size or extend(kv, start + 1, computed=start)
            if draft or not fits:
                self._schedule_running(req, draft)
                continue
            # `_schedule_running`, inlined for the most frequent case
            self.num_decodes += self.num_decodes == len(slices)
            slices.append(Slice(req, start, start + 1, True))
            req.computed, req.pending = start + 1, pending + 1
            self._budget -= 1
            self.planned_tokens += 1
        return prompts

    @property
    def _share_of_stages(self) -> int | None:
        """Decodes of one step, so that each pipeline stage has a batch; None: all of them."""
        if self._stages == 1:
            return None
        if self._limits.stage_batch is not None:
            return self._limits.stage_batch
        decoding = sum(req.computed >= req.prompt_len for req in self._running)
        return -(-decoding // self._limits.inflight)

    def _schedule_running(self, req: Req, draft: Draft | None = None) -> None:
        """Plan a slice of a running request; `draft` are its draft tokens, if any."""
        if req.kv is None or not self._may_run(req, running=True):
            return
        size = self._slice_size(req)
        draft, start = draft or self._draft(req, size), req.computed
        if self._lacks_block(req, size, draft):
            return
        stop = start + size + self._block_tokens(draft)
        while size and req.kv and not self._cache.extend(req.kv, stop, computed=start):
            victim = self._preemption.victim(self._slices, req.kv.rank)
            if victim is req and len(self._running) == 1:
                return  # memory is short for a moment
            self.admission.on_retract(self._running)
            self.retract(victim)
        if size and req.kv:
            self._append_slice(req, size, draft)
            if req in self._loaded:
                self._loaded.discard(req)
                self.started.append(self._slices[-1])

    def _slice_size(self, req: Req) -> int:
        """Choose how many tokens to compute."""
        room = self._budget if req.lacking == 1 else min(self._budget, self._chunk)
        if self._is_whole(req):
            return req.lacking if req.lacking <= room or not self._slices else 0
        size = min(req.lacking, room)
        if size <= 0 or (req.computed >= req.prompt_len and not self._hooks.fills):
            return size
        fresh = self._chunk == self._first_chunk  # the first prompt may use the whole chunk
        limit = min(self._budget, self._cache.max_step_tokens) if fresh else room
        size = self._hooks.cut(req, size, limit)
        if not size and not self._slices:
            self.refused[req.rid] = RequestError(
                f"{limit} tokens of a step are too few for an image, which cannot be split "
                "(scheduler.max_batch_tokens).",
                param="media",
            )
        return size

    def _draft(self, req: Req, size: int) -> Draft | None:
        """Return draft tokens to verify after the newest token, and allocate memory for them.

        Draft tokens that do not fit, or that the executor cannot verify, are dropped.
        """
        if self._plain or not req.generates or req.pending or size != req.lacking or size != 1:
            return None
        if self._hooks.fills:
            return self._hooks.draft(req, self._budget - size)
        limit = min(
            self._budget - size,
            req.max_tokens - req.num_tokens - 1,  # one more token follows them
            self._max_sampled_rows - len(self._running) - self._drafted,
        )
        draft = self._hooks.draft(req, limit) if limit > 0 else None
        if draft is None or req.kv is None or not 0 < len(draft.tokens) <= limit:
            return None
        caps = self._deps.executor.caps
        if draft.is_chain:
            verifiable = caps.draft_chains
        else:
            verifiable = caps.draft_trees and self._fits_paths(draft, self._budget - size)
        stop = req.computed + size + len(draft.tokens)
        fits = verifiable and self._cache.extend(req.kv, stop, computed=req.computed)
        return draft if fits else None

    def _lacks_block(self, req: Req, size: int, draft: Draft | None) -> bool:
        """Whether a diffusion request would get its newest token computed, but not its block."""
        return self._hooks.fills and draft is None and size == req.lacking

    def _block_tokens(self, draft: Draft | None) -> int:
        """Mask tokens of the block that a step fills; they need KV memory like any other token."""
        return len(draft.tokens) if draft and self._hooks.fills else 0

    def _fits_paths(self, draft: Draft, budget: int) -> bool:
        """Whether all paths of a tree can be computed in this step."""
        limit = self._deps.executor.caps.tree_paths
        return not limit or (draft.rows <= budget and self._paths + draft.paths - 1 <= limit)

    # ---- waiting requests

    def _start_waiting(self) -> None:
        if not self._has_room or self._is_full():
            return
        reserved = self.admission.reserved_tokens(self._running)
        leaders = [r for r in self._running if r.computed < r.prompt_len]
        limit = max_starts(len(self._slices)) if self._slices else self._limits.max_running_reqs
        for req in self._waiting.candidates():
            if not self._has_room or len(self.started) >= limit:
                return
            if req.pending or not self._may_run(req, running=False):
                continue
            if leaders and self._waits_for_shared_prefix(req, leaders):
                continue
            if (verdict := self._admit(req)) is Verdict.WAIT:
                continue
            if not self._make_room(req, reserved) or not self._start(req, verdict):
                return
            reserved += self.admission.expected_outputs(req)
            if req.computed < req.prompt_len:
                leaders.append(req)

    @property
    def _has_room(self) -> bool:
        """Whether this step has room for tokens and a sampled row of one more request."""
        sampled = len(self._running) + self._drafted
        return self._budget > 0 and self._chunk > 0 and sampled < self._max_sampled_rows

    def _admit(self, req: Req) -> Verdict:
        loading = self._requests.loading
        admitted = [*self._running, *loading.values()] if loading else self._running
        try:
            return self._hooks.admit(req, admitted)
        except RequestError as error:
            self.refused[req.rid] = error
            return Verdict.WAIT

    def _preempt_for_urgent(self) -> None:
        """Retract victims for the most urgent waiting request, before any slice is planned."""
        if self._chunk <= 0:
            return
        if not self._preemption.is_possible(self._waiting.highest_priority):
            return
        urgent = max(self._waiting, key=lambda r: (r.request.priority, -r.order))
        if not urgent.pending and self._may_run(urgent, running=False):
            self._make_room(urgent, self.admission.reserved_tokens(self._running))

    def _make_room(self, req: Req, reserved: float) -> bool:
        """Whether `req` fits, after retracting less urgent requests if necessary."""
        need = req.num_tokens + self.admission.expected_outputs(req) + self._cache.page_size
        while not self._fits(req, need, reserved):
            victim = self._preemption.victim_of(req, self._slices)
            if victim is None:
                return False
            reserved -= self.admission.expected_outputs(victim)
            self.retract(victim)
        return True

    def _is_full(self) -> bool:
        loading = self._requests.loading
        return len(self._running) + len(loading) >= self._limits.max_running_reqs

    def _fits(self, req: Req, need: float, reserved: float) -> bool:
        if not self._running and not self._requests.loading:
            return True
        if self._is_full():
            return False
        free = self._cache.available_tokens - reserved
        if need <= free:
            return True
        return need - self._lookup.cached_tokens(req, on_device=True) <= free

    def _waits_for_shared_prefix(self, req: Req, leaders: Sequence[Req]) -> bool:
        """Whether a running prompt is computing an uncached prefix that `req` shares."""
        if self._waiting.is_aged(req) or not isinstance(req.request, GenerateRequest):
            return False
        return self._lookup.could_share_more(req, leaders, max(MIN_SHARED_TOKENS, self._page_size))

    def _start(self, req: Req, verdict: Verdict) -> bool:
        """Allocate memory for `req` and plan its first slice or load; False if memory is short."""
        kv = self._cache.acquire(
            self._lookup.key(req),
            self._lookup.limit(req),
            step=self.step if self._limits.share_in_batch else 0,
            priority=req.request.priority,
            load=self._hooks.load_limit(req, NEVER) if req.may_load else 0,
        )
        req.kv, req.computed = kv, kv.cached
        loads = kv.loading is not None or (verdict is Verdict.LOAD and req.may_load)
        size = req.lacking if loads else self._slice_size(req)
        draft = self._draft(req, size) if self._hooks.fills else None
        if self._lacks_block(req, size, draft):
            size = 0
        if kv.loading is not None:
            size = 0  # the handle has the pages that the load fills
        enough = (loads or size) and (self._cache.states is None or kv.state is not None)
        stop, from_ = req.computed + size + self._block_tokens(draft), req.computed
        if loads and size:  # a load ends in its last page, so windows need no more memory
            from_ = max(from_, (stop - 1) // self._page_size * self._page_size)
        if not enough or not self._cache.extend(kv, stop, computed=from_):
            self._cache.release(kv, 0, req.tokens.view(0, 0), step=self.step)
            req.kv, req.computed = None, 0
            if loads and not self._running and not self._requests.loading:
                req.may_load = False  # its tokens can never all fit at once
            return False
        if not req.started_s:
            req.started_s = self._deps.clock()
            req.cached_tokens = min(kv.cached, req.prompt_len)
        if loads:
            req.loading_since_s = self._deps.clock()
            self._requests.move(req, Phase.LOADING)
            self._hooks.on_load(req)
            return True
        self._requests.move(req, Phase.RUNNING)
        self._append_slice(req, size, draft)
        self.started.append(self._slices[-1])
        return True

    # ---- both

    def _append_slice(self, req: Req, size: int, draft: Draft | None) -> None:
        """Mark the next `size` tokens of `req` as scheduled and share its prompt so far."""
        assert req.kv is not None
        stop = req.computed + size
        piece = Slice(
            req, req.computed, stop, stop == req.num_tokens, draft, whole=self._is_whole(req)
        )
        is_prompt = req.computed < req.prompt_len
        drafted = len(draft.tokens) if draft else 0
        req.computed, req.pending = stop + drafted, req.pending + piece.samples
        self._slices.append(piece)
        self.planned_tokens += size
        self._budget -= size + drafted
        if draft and not draft.is_chain and self._deps.executor.caps.tree_paths:
            self._budget -= draft.rows - drafted
            self._paths += draft.paths - 1
        self._drafted += 0 if self._hooks.fills else drafted
        self._chunk = max(0, self._chunk - size) if size > 1 else self._chunk
        if is_prompt and self._limits.share_in_batch:
            done = min(stop, len(req.tokens))
            self._cache.publish(
                req.kv,
                done,
                req.tokens.view(0, done),
                step=self.step,
                priority=req.request.priority,
            )

    def _may_run(self, req: Req, *, running: bool) -> bool:
        try:
            return self._hooks.may_run(req, running=running)
        except RequestError as error:
            self.refused[req.rid] = error
            return False

    def _is_whole(self, req: Req) -> bool:
        return self._limits.whole_prompts and isinstance(req.request, EmbedRequest)


class Decodes:
    """Plans all decoding requests at once, and reuses their slice objects from step to step.

    Usable only when no step is in flight during planning, because a step in flight owns its slices.
    """

    def __init__(self, cache: KVMemory) -> None:
        self._cache = cache
        self._slices: tuple[Slice, ...] = ()  # slices of the previous step, if it only decoded
        self.growth = NO_GROWTH  # page growth of the slices planned last

    def plan(self, running: Sequence[Req]) -> tuple[list[Slice], list[Req]] | None:
        """Return the decode slices, and the other requests in order.

        Returns None, changing nothing, if memory is short.
        """
        page_size = self._cache.page_size
        slices: list[Slice] = []
        others: list[Req] = []
        grown: list[Req] = []
        for req in running:
            start, kv = req.computed, req.kv
            if req.tokens.length != start + 1 or start < req.prompt_len or req.pending or not kv:
                others.append(req)
                continue
            if start >= kv.num_pages * page_size:
                grown.append(req)
            piece = req.decode
            if piece is None:
                piece = req.decode = Slice(req, start, start + 1, True)
            piece.start = start
            piece.stop = req.computed = start + 1
            req.pending = 1
            slices.append(piece)
        if not grown:
            self.growth = NO_GROWTH
            return slices, others
        pages = self._cache.grow([req.kv for req in grown if req.kv is not None])
        if pages is None:
            for piece in slices:
                piece.req.computed, piece.req.pending = piece.start, 0
            return None
        self.growth = Growth(tuple(grown), pages)
        return slices, others

    def whole_step(self, slices: Sequence[Slice], num_decodes: int) -> tuple[Slice, ...]:
        """All slices of the planned step; reuses the last tuple if only positions changed.

        `num_decodes`: the count of leading slices that came from `plan`.
        """
        before = self._slices
        only = 0 < num_decodes == len(slices)
        if only and len(before) == len(slices) and all(map(is_, before, slices)):
            return before
        whole = tuple(slices)
        self._slices = whole if only else ()
        return whole


def paced_tokens(policy: PacingPolicy, running: Sequence[Req], waiting: WaitingQueue) -> int | None:
    """Return the prompt-token budget of this step; None if no prompt is pending.

    Never zero while any request is aged: this bounds starvation.
    """
    prompts = [r for r in running if r.lacking > 1]
    urgent = max((r.priority for r in prompts), default=None)
    if len(waiting):
        highest = waiting.highest_priority
        urgent = highest if urgent is None else max(urgent, highest)
    if urgent is None:
        return None
    tokens = policy.prompt_tokens(running, urgent)
    if tokens < AGED_TOKENS and (waiting.any_aged or any(map(waiting.is_aged, prompts))):
        return AGED_TOKENS
    return tokens
