"""Control half of speculation with draft heads, which draft at the end of each step.

The head's inputs exist only together with the step's hidden states. So the number of drafts is
decided when the step is launched, and the next step verifies them.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from sylvan.runtime.core.req import Batch, Draft, Req, Slice
from sylvan.runtime.features.speculation.api import (
    FAILURES,
    Proposal,
    SpeculationCounts,
    check,
    depth_of,
)
from sylvan.runtime.features.speculation.depth import TRIED, CommonDepth, Pauses
from sylvan.runtime.features.speculation.head_work import CHAIN, HeadReport, HeadWork, TreeShape
from sylvan.runtime.sched.capability import Capability
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


class HeadSpeculation(Capability):
    """Drafts with a draft head, verified as chains or trees.

    Args:
        most: Largest draft depth.
        vocab_size: Upper bound of token IDs.
        adaptive: Choose the depth by measured acceptance and times; otherwise always `most`.
        clock: Clock for timing.
        shape: Shape of the trees.
    """

    name: ClassVar = "speculation"
    work_type: ClassVar = HeadWork
    report_type: ClassVar = HeadReport

    def __init__(
        self,
        most: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Clock = monotonic,
        shape: TreeShape = CHAIN,
    ) -> None:
        self.counts = SpeculationCounts()
        self._vocab_size = vocab_size
        self._max_guesses = max(most, shape.nodes)
        self._depth = CommonDepth(most, clock, adaptive=adaptive, width=shape.width)
        self._pauses = Pauses()
        self._verifies = False  # whether to verify what the step in flight drafts
        self._brought: dict[Req, Proposal] = {}  # of the newest step
        self._proposals: dict[Req, tuple[Proposal, int]] = {}  # and the tokens known then

    @property
    def saved_s(self) -> float:
        """Estimate of the seconds saved by drafts; see `StepTimer`."""
        return self._depth.timer.saved_s

    # ---- drafts

    def may_draft(self) -> bool:
        for req, (proposal, known) in tuple(self._proposals.items()):
            if req.tokens.length > known:
                self._depth.record(req, proposal.tokens, known, proposal.parents)
                del self._proposals[req]
        for req, proposal in self._brought.items():
            self._proposals[req] = proposal, req.tokens.length
        self._brought.clear()
        return self._verifies and bool(self._proposals)

    def draft(self, req: Req, most: int) -> Draft | None:
        proposal, known = self._proposals.get(req, (None, 0))
        if proposal is None or known != req.tokens.length:
            return None
        self.counts.drafts += 1
        return proposal.draft(most)

    def plan_work(self, batch: Batch) -> HeadWork | None:
        """The head reads everything that is computed, including prompts."""
        pieces = batch.slices
        if not any(piece.req.generates for piece in pieces):
            return None
        depths = [0] * len(pieces)
        if self._pauses.due():
            asking = [i for i, p in enumerate(pieces) if p.samples and self._room(p) > 0]
            depth = self._depth.of([pieces[i].req for i in asking]) if asking else 0
            if asking:
                self._verifies = depth > 0
                self._pauses.looked(pays=self._verifies)
            for i in asking if depth else asking[:TRIED]:
                depths[i] = min(depth or 1, self._room(pieces[i]))
        else:
            self._verifies = False
        return HeadWork(depths, [_following(piece) for piece in pieces])

    def _room(self, piece: Slice) -> int:
        """Return how many drafts fit after the tokens that the step yields at least."""
        req = piece.req
        return req.max_tokens - req.num_tokens - 1 if req.generates else 0

    # ---- results

    def on_start(self, piece: Slice) -> None:
        self._depth.follow(piece.req)

    def on_batch(self, batch: Batch) -> None:
        self._depth.timer.begin(batch)

    def on_result(self, batch: Batch, report: HeadReport | None) -> None:
        self._depth.timer.end(report.guess_s if report else 0.0)
        if report is None:
            return
        if report.failure:
            self._failed(report.failure)
        if not report.guesses:
            return
        self.counts.looks += 1
        proposals = {
            index: Proposal(tuple(tokens), parents=tuple(report.parents.get(index, ())))
            for index, tokens in report.guesses.items()
        }
        depths = [depth_of(proposal) for proposal in proposals.values()]
        self._depth.took(report.guess_s, max(1, *depths))
        for (index, proposal), depth in zip(proposals.items(), depths, strict=True):
            try:
                check(proposal, self._max_guesses, self._vocab_size)
            except FAILURES as error:
                self._failed(str(error))
            else:
                if proposal.tokens:
                    self._brought[batch.slices[index].req] = proposal
                    self._depth.drafted(depth, proposal.draft(self._max_guesses).rows)

    def on_finish(self, req: Req) -> None:
        self._depth.forget(req)
        self._proposals.pop(req, None)
        self._brought.pop(req, None)

    def _failed(self, why: str) -> None:
        self.counts.failures += 1
        if self.counts.failures == 1:
            logger.error("the draft head failed; further failures are only counted: %s", why)


def _following(piece: Slice) -> int:
    """Return the token after a slice that samples none; -1: there is none, or it samples one."""
    req = piece.req
    if piece.samples or not req.generates or piece.stop >= req.tokens.length:
        return -1
    return int(req.tokens.view(piece.stop, piece.stop + 1)[0])
