"""Control half of speculation by a model: it writes for all requests at once, before each step.

What the model reads and writes takes time, so how far it writes is decided first: as far as gives
the batch the most tokens a second, the time of writing included.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, ClassVar

from sylvan.runtime.core.req import Batch, Draft, Phase, Req, Slice
from sylvan.runtime.features.speculation.acceptance import Acceptance, settle
from sylvan.runtime.features.speculation.api import (
    FAILURES,
    Proposal,
    SpeculationCounts,
    check,
)
from sylvan.runtime.features.speculation.cost import RECENT, StepCosts
from sylvan.runtime.features.speculation.model import WritingAhead
from sylvan.runtime.features.speculation.policy import LEAST_GAIN
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.runtime.sched.capability import Capability
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 64
"""Steps from one trial to the next where guesses are not worth it."""
TRIED = 2
"""Requests of a trial."""


class ModelSpeculation(Capability):
    """Guesses by a model, verified as chains of one length for all requests.

    Args:
        model: Writes them.
        most: Guesses of a request in one step.
        vocab_size: Ids are below it.
        adaptive: As many as pay, by measured acceptance and times; else always `most`.
        clock: For times.
    """

    name: ClassVar = "speculation"

    def __init__(
        self,
        model: WritingAhead,
        most: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Clock = monotonic,
    ) -> None:
        self.counts = SpeculationCounts()
        self._model, self._most, self._vocab_size = model, most, vocab_size
        self._adaptive, self._clock = adaptive, clock
        self._costs = StepCosts()
        self._timer = StepTimer(self._costs, clock)
        self._writing: deque[float] = deque(maxlen=RECENT)  # seconds for a guess of each request
        self._of_all = Acceptance()
        self._followed: dict[Req, Acceptance] = {}
        self._proposals: dict[Req, tuple[Proposal, int]] = {}  # and the tokens known then
        self._step = self._wake = 0
        self._pause = 1

    # ---- guesses

    def may_draft(self) -> bool:
        """See `Capability.may_draft`; the model writes here."""
        self._step += 1
        if self._step < self._wake:
            return False
        reqs = [req for req in self._followed if _may_be_drafted(req)]
        self._settle()
        if not reqs:
            return False
        depth = self._depth(reqs)
        self._pause = 1 if depth else min(2 * self._pause, LONGEST_PAUSE)
        self._wake = self._step + self._pause
        if depth:
            self._write(reqs, depth)
        else:  # guesses to compare with what comes
            self._write(reqs[:TRIED], 1)
        return depth > 0

    def draft(self, req: Req, most: int) -> Draft | None:
        """See `Capability.draft`."""
        proposal, known = self._proposals.get(req, (None, 0))
        if proposal is None or known != req.tokens.length:
            return None
        tokens = proposal.tokens[:most]
        self.counts.drafts += 1
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)))

    def _write(self, reqs: list[Req], depth: int) -> None:
        wishes = {req: min(depth, req.max_tokens - req.num_tokens - 1) for req in reqs}
        wishes = {req: count for req, count in wishes.items() if count > 0}
        if not wishes:
            return
        self.counts.looks += 1
        begun_s = self._clock()
        try:
            for req, tokens in self._model.write(wishes).items():
                proposal = Proposal(tuple(tokens))
                check(proposal, wishes[req], self._vocab_size)
                self._proposals[req] = proposal, req.tokens.length
        except FAILURES:
            self._proposals.clear()
            self.counts.failures += 1
            if self.counts.failures == 1:
                logger.exception("the draft model failed; further failures are only counted")
        self._writing.append((self._clock() - begun_s) / max(wishes.values()))

    def _depth(self, reqs: list[Req]) -> int:
        """Guesses for each request that give the most tokens a second."""
        if not self._adaptive:
            return self._most
        if not self._costs.known or not self._writing:
            return 0
        # the first time it reads a prompt, which is not what the next guess takes
        write_s = sorted(self._writing)[(len(self._writing) - 1) // 2]
        expected = [self._followed[req].expected(0, self._most) for req in reqs]
        rates = [
            sum(tokens[depth] for tokens in expected)
            / (self._costs.seconds(len(reqs) * (1 + depth)) + depth * write_s)
            for depth in range(self._most + 1)
        ]
        best = max(range(self._most + 1), key=rates.__getitem__)
        return best if rates[best] > rates[0] * (1 + LEAST_GAIN) else 0

    def _settle(self) -> None:
        """Compare guesses with what came."""
        for req, (proposal, known) in self._proposals.items():
            if req in self._followed and req.tokens.length > known:
                came = req.tokens.view(known, req.tokens.length)[: len(proposal.tokens)].tolist()
                settle(self._followed[req], proposal.grade, proposal.tokens, came)
        self._proposals.clear()

    # ---- what happened

    def on_start(self, piece: Slice) -> None:
        """See `Capability.on_start`."""
        if piece.req.generates and piece.req not in self._followed:
            self._followed[piece.req] = Acceptance(self._of_all)

    def on_batch(self, batch: Batch) -> None:
        """See `Capability.on_batch`."""
        self._timer.begin(batch)

    def on_result(self, batch: Batch, report: Any) -> None:
        """See `Capability.on_result`."""
        self._timer.end()

    def on_finish(self, req: Req) -> None:
        """See `Capability.on_finish`."""
        self._followed.pop(req, None)
        self._proposals.pop(req, None)


def _may_be_drafted(req: Req) -> bool:
    """Whether the next step would verify guesses: the newest token is known, and alone lacks KV."""
    return req.phase is Phase.RUNNING and not req.pending and req.lacking == 1
