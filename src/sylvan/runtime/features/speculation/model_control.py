"""Control half of speculation with a draft model, which drafts for all requests before each step.

Drafting takes time, so its depth is decided first: the depth that maximises the batch's tokens per
second, drafting time included.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from sylvan.runtime.core.req import Batch, Draft, Phase, Req, Slice
from sylvan.runtime.core.step import chain
from sylvan.runtime.features.speculation.api import (
    FAILURES,
    Proposal,
    SpeculationCounts,
    check,
)
from sylvan.runtime.features.speculation.depth import TRIED, CommonDepth, Pauses
from sylvan.runtime.features.speculation.draft_model import BatchDrafter
from sylvan.runtime.sched.capability import Capability
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


class ModelSpeculation(Capability):
    """Drafts with a model, verified as chains of one length for all requests.

    Args:
        model: Drafts.
        limit: Most drafts of a request in one step.
        vocab_size: Upper bound of token IDs.
        adaptive: Choose the depth by measured acceptance and times; otherwise always `limit`.
        clock: Clock for timing.
    """

    name: ClassVar = "speculation"

    def __init__(
        self,
        model: BatchDrafter,
        limit: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Clock = monotonic,
    ) -> None:
        self.counts = SpeculationCounts()
        self._model, self._vocab_size, self._clock = model, vocab_size, clock
        self._depth = CommonDepth(limit, clock, adaptive=adaptive)
        self._pauses = Pauses()
        self._proposals: dict[Req, tuple[Proposal, int]] = {}  # and the tokens known then

    @property
    def saved_s(self) -> float:
        """Estimate of the seconds saved by drafts; see `StepTimer`."""
        return self._depth.timer.saved_s

    # ---- drafts

    def may_draft(self) -> bool:
        """Run the draft model."""
        if not self._pauses.due():
            return False
        reqs = [req for req in self._depth.followed if _may_be_drafted(req)]
        for req, (proposal, known) in self._proposals.items():
            self._depth.record(req, proposal.tokens, known)
        self._proposals.clear()
        if not reqs:
            return False
        depth = self._depth.of(reqs)
        self._pauses.record_retry(pays=depth > 0)
        if depth:
            self._write(reqs, depth)
        else:  # drafts to compare with the actual tokens
            self._write(reqs[:TRIED], 1)
        return depth > 0

    def draft(self, req: Req, limit: int) -> Draft | None:
        proposal, known = self._proposals.get(req, (None, 0))
        if proposal is None or known != req.tokens.length:
            return None
        tokens = proposal.tokens[:limit]
        self.counts.drafts += 1
        return Draft(tokens, chain(len(tokens)))

    def _write(self, reqs: list[Req], depth: int) -> None:
        counts = {req: min(depth, req.max_tokens - req.num_tokens - 1) for req in reqs}
        counts = {req: count for req, count in counts.items() if count > 0}
        if not counts:
            return
        self.counts.looks += 1
        begun_s = self._clock()
        try:
            for req, tokens in self._model.write(counts).items():
                proposal = Proposal(tuple(tokens))
                check(proposal, counts[req], self._vocab_size)
                self._proposals[req] = proposal, req.tokens.length
        except FAILURES:
            self._proposals.clear()
            self.counts.failures += 1
            if self.counts.failures == 1:
                logger.exception("the draft model failed; further failures are only counted")
        seconds = self._clock() - begun_s
        self._depth.timer.other_work(seconds)
        self._depth.record_draft_time(seconds, max(counts.values()))

    # ---- results

    def on_start(self, piece: Slice) -> None:
        self._depth.follow(piece.req)

    def on_batch(self, batch: Batch) -> None:
        self._depth.timer.begin(batch)

    def on_result(self, batch: Batch, report: Any) -> None:
        self._depth.timer.end()

    def on_finish(self, req: Req) -> None:
        self._depth.forget(req)
        self._proposals.pop(req, None)


def _may_be_drafted(req: Req) -> bool:
    """Whether the next step can verify drafts: only the newest token lacks KV, and it is known."""
    return req.phase is Phase.RUNNING and not req.pending and req.lacking == 1
