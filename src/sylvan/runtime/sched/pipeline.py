"""Launches steps, and processes their results in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sylvan.protocol.errors import DeviceMemoryError, ExecutorError, RequestError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.step import SliceOutput, StepResult
from sylvan.runtime.executor.api import Pending
from sylvan.runtime.sched.capability import Hooks
from sylvan.runtime.sched.lifecycle import Lifecycle
from sylvan.runtime.sched.limits import SchedulerDeps
from sylvan.runtime.sched.outputs import (
    accept_plain,
    emittable,
    finish_reason,
    head,
    output,
    refusal,
    without_chosen,
)
from sylvan.runtime.sched.plan_builder import PlanBuilder
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.statistics import Statistics
from sylvan.runtime.sched.step_times import StepTimes

logger = logging.getLogger(__name__)


class Pipeline:
    """Launches batches as step plans, and processes results in the same order.

    Attributes:
        inflight: Launched steps without a result, oldest first. Read only.
    """

    def __init__(
        self,
        deps: SchedulerDeps,
        hooks: Hooks,
        planner: Planner,
        lifecycle: Lifecycle,
        statistics: Statistics,
        times: StepTimes,
    ) -> None:
        self._executor, self._cache = deps.executor, deps.cache
        self._hooks, self._planner, self._times = hooks, planner, times
        self._lifecycle, self._statistics = lifecycle, statistics
        caps = deps.executor.caps
        self._builder = PlanBuilder(caps.max_running_reqs, resolves=caps.stages == 1)
        self.inflight: deque[tuple[Batch, Pending]] = deque()
        self._steps: deque[int] = deque()  # the planner's step numbers of those in flight

    @property
    def completed_step(self) -> int:
        """The planner's last step whose results arrived, or that had nothing to compute."""
        return self._steps[0] - 1 if self._steps else self._planner.step

    @property
    def decoding(self) -> Batch | None:
        """The step in flight, if it is the only one and all its requests decode."""
        if len(self.inflight) != 1:
            return None
        batch, _ = self.inflight[0]
        return batch if batch.slices and batch.decodes else None

    def skip(self, steps: int, pending: Pending) -> None:
        """Replace the step in flight by a later one of the same requests; see `skipping`."""
        batch, _ = self.inflight[0]
        self.inflight[0] = (batch, pending)
        self._steps[0] += steps
        self._builder.skip(steps)
        self._statistics.skip(steps, len(batch.slices))

    def launch(self, batch: Batch) -> None:
        """Start a step."""
        plan = self._builder.build(batch, self._hooks.plan_work(batch))
        if self._hooks.observed:
            self._hooks.on_plan(plan)
        self._times.launching(batch, self._planner.retractions)
        self.inflight.append((batch, self._executor.launch(plan)))
        self._steps.append(self._planner.step)

    def complete_oldest(self) -> bool:
        """Process the oldest step in flight; return whether it computed anything."""
        batch, pending = self.inflight.popleft()
        self._steps.popleft()
        try:
            result = pending.wait()
        except ExecutorError as error:
            self._hooks.on_completed(error)
            self._times.completed(failed=True)
            self._fail(batch, error)
            return True
        if self._hooks.observed:
            self._hooks.on_completed(result)
        now = self._times.completed()
        self._hooks.on_result(batch, result)
        self._accept_all(batch.slices, result, now)
        self._planner.step_size.on_step()
        return bool(batch.slices) or any(report is not None for report in result.reports.values())

    # ---- inside

    def _fail(self, batch: Batch, error: ExecutorError) -> None:
        """Discard the KV of a failed step, including pages shared from it."""
        if isinstance(error, DeviceMemoryError) and self._planner.step_size.shrink(batch):
            logger.warning("a step ran out of memory, retrying with smaller steps: %s", error)
            later = [launched for launched, _ in self.inflight]
            self._lifecycle.forget(roll_back(batch, later, self._planner.retract))
        else:
            logger.error("step failed; its requests are ended", exc_info=error)
            for piece in batch.slices:
                piece.req.pending -= piece.samples
                piece.req.computed = 0
                reason = Finish(type="abort", message=str(error), status=500)
                self._lifecycle.abort(piece.req.rid, reason)
        self._cache.clear()

    def _accept_all(self, pieces: Sequence[Slice], result: StepResult, now: float) -> None:
        if self._hooks.follows_tokens:
            left = [*zip(pieces, result.outputs, strict=True)]
        else:
            left = accept_plain(pieces, result, self._lifecycle.outbox)
            self._statistics.generated += len(pieces) - len(left)
        for piece, out in left:
            self._accept(piece, out, now)

    def _accept(self, piece: Slice, out: SliceOutput, now: float) -> None:
        """Process the result of one slice."""
        req = piece.req
        if piece.samples:
            req.pending -= 1
        if piece.draft and req.kv:  # rejected draft tokens must not enter the cache
            drafted, accepted = len(piece.draft.tokens), out.num_accepted
            req.computed -= drafted - accepted
            if not self._hooks.fills:
                self._statistics.on_verified(req, drafted, accepted)
        if req.finish:
            return  # it ended while the step was in flight
        if out.error:
            reason = Finish(type="abort", message=out.error, status=out.status)
            self._lifecycle.abort(req.rid, reason)
            return
        if not piece.samples:
            return  # not the last chunk
        if not req.first_token_s:
            req.first_token_s = now
            self._statistics.cached += req.cached_tokens
        if isinstance(req.request, EmbedRequest):
            fields = self._hooks.output_fields(req)
            self._lifecycle.finish(req, Finish(type="stop"))
            self._lifecycle.outbox.append(output(req, now, **fields))
        else:
            if len(out.token_ids) > 1 and not piece.draft:
                self._void_later_samples(req)
            self._accept_tokens(req, out, now)

    def _accept_tokens(self, req: Req, out: SliceOutput, now: float) -> None:
        tokens, finish = out.token_ids, Finish(type="stop") if out.ended else None
        only_prefill = req.max_tokens == req.prompt_len
        if only_prefill:  # prefill only: report logprobs, emit no token
            tokens, finish = (), Finish(type="length", length=0)
        for count, token in enumerate(tokens, 1):
            req.tokens.append(token)
            if found := finish_reason(req, token):
                tokens, finish = tokens[:count], found
                break
        self._statistics.generated += len(tokens)
        if req.review is not None and tokens:
            req.review.keep(head(out.logprobs, len(tokens)))
            finish = self._review(req, len(tokens), finish, ended=out.ended)
        if self._hooks.follows_tokens:
            self._notify(req, tokens)
        fields = self._hooks.output_fields(req) if self._hooks.adds_output_fields else {}
        if finish and not req.finish:
            self._lifecycle.finish(req, finish)
        if req.finish or fields or emittable(req) >= req.emit_at:
            found = out.logprobs
            logprobs = without_chosen(found) if only_prefill else head(found, len(tokens))
            if req.review is not None and not only_prefill:
                logprobs = req.review.take(emittable(req) - req.num_emitted)
            self._lifecycle.outbox.append(output(req, now, logprobs=logprobs, **fields))

    def _notify(self, req: Req, tokens: Sequence[int]) -> None:
        try:
            self._hooks.on_tokens(req, tokens)
        except RequestError as error:  # only this request fails
            self._lifecycle.refuse(req, error)

    def _review(self, req: Req, count: int, finish: Finish | None, *, ended: bool) -> Finish | None:
        """Let capabilities review the newest tokens; return the resulting finish, if any."""
        state = req.review
        assert state is not None
        complete = ended or (finish is not None and finish.type == "stop")
        try:
            review = self._hooks.review(req, count, complete=complete)
        except RequestError as error:
            return refusal(error)
        state.final = max(state.final, review.final)
        if review.kept < req.tokens.length:
            self._truncate(req, max(review.kept, req.num_emitted))
            return None
        if finish is not None:
            state.final = req.tokens.length
        return finish

    def _truncate(self, req: Req, length: int) -> None:
        """Drop the tokens from `length` on; earlier KV stays valid and shared."""
        assert req.review is not None
        self._void_later_samples(req)
        req.review.drop(req.tokens.length - length)
        req.tokens.truncate(length)
        req.computed = min(req.computed, length)
        self._planner.start_again(req)
        self._lifecycle.forget([req.rid])

    def _void_later_samples(self, req: Req) -> None:
        """Discard later samples in flight after a step that appended several tokens."""
        for batch, _ in self.inflight:
            for piece in batch.slices:
                if piece.req is req and piece.samples:
                    piece.samples = False
                    req.pending -= 1
        req.computed = min(req.computed, req.tokens.length + 1)
        self._builder.reset_decodes()


def roll_back(failed: Batch, later: Iterable[Batch], retract: Callable[[Req], None]) -> list[str]:
    """Undo a step that did not run, and the results that later steps derive from its tokens.

    Returns the rids of requests that start over, for the executor to drop.
    """
    reqs = {piece.req.rid: piece.req for piece in failed.slices}
    for piece in failed.slices:
        piece.req.pending -= piece.samples
    for batch in later:
        for piece in batch.slices:
            if piece.samples and piece.req.rid in reqs:
                piece.samples = False
                piece.req.pending -= 1
    restarted: list[str] = []
    for req in reqs.values():
        if req.finish is None and req.kv is not None:
            req.computed = 0  # its KV is invalid: share nothing
            retract(req)
            restarted.append(req.rid)
    return restarted
