"""Control half of speculation: asks a drafter, and has as many guesses verified as are worth it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.runtime.core.req import Batch, Draft, Req, Slice
from sylvan.runtime.features.speculation.acceptance import Acceptance, settle, settle_tree
from sylvan.runtime.features.speculation.api import (
    FAILURES,
    NOTHING,
    Drafter,
    Proposal,
    SpeculationCounts,
    check,
    depth_of,
    rising,
)
from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.runtime.features.speculation.looks import STEPS_SHARE, Looks
from sylvan.runtime.features.speculation.policy import DraftPolicy, FixedLength, Throughput
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.runtime.sched.capability import Capability
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 32
"""Steps without a look at a request whose guesses are not worth it; a power of two."""
FIRST_LOOKS = 6
"""Steps of a request in which nothing to guess from is no reason to pause: a copy, if there is one,
mostly begins with the answer, and short answers would end before the next look."""


TIMED, TIMED_EVERY = 4, 32
"""Of steps without guesses so many are timed: those of a small model are so short that they feel
it."""
REACH = 6
"""So much further than was worth it the last time is guessed: guesses take time, too."""


@dataclass(slots=True)
class _Followed:
    """A request that may be drafted for.

    Attributes:
        proposal: The newest, verified or only looked at; made behind `length` tokens.
        looks: So many found nothing that could be guessed.
        pause: Steps from one look to the next.
        look_at: Number of the step of the next look.
        pays: Its last guesses were worth verifying.
        reach: Tokens ahead that are guessed at the next look.
    """

    acceptance: Acceptance
    proposal: Proposal = NOTHING
    length: int = 0
    looks: int = 0
    pause: int = 1
    look_at: int = 0
    pays: bool = False
    reach: int = REACH


class Speculation(Capability):
    """Guesses by one drafter, verified as the chains or trees that it proposes.

    A request whose guesses would cost more than they bring is looked at less and less often:
    guesses are then compared with what comes anyway, and verified again once they are worth it.

    Args:
        drafter: Makes the guesses.
        most: Guesses of a request in one step.
        vocab_size: Ids are below it.
        adaptive: Verify what pays, by measured acceptance and step times; else always `most`.
        clock: For step times.
    """

    name: ClassVar = "speculation"

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Clock = monotonic,
    ) -> None:
        self.counts = SpeculationCounts()
        self._drafter, self._most, self._vocab_size = drafter, most, vocab_size
        self._clock = clock
        self._costs = StepCosts()
        self._policy: DraftPolicy = Throughput(self._costs) if adaptive else FixedLength()
        self._adaptive = adaptive
        self._of_all = Acceptance()
        self._followed: dict[Req, _Followed] = {}
        self._step = 0
        self._wake = 0  # number of the step in which some request is to be looked at
        self._timer = StepTimer(self._costs, clock)
        self._looks = Looks(self._costs, self._timer)
        self._planned_s = self._looking_s = 0.0  # when planning began, and looks since then
        self._idle = 0  # steps since guesses were looked for
        self._last: Sequence[Slice] = ()  # of the step before
        self._paying = 0  # requests whose last guesses were worth verifying

    @property
    def won_s(self) -> float:
        """Seconds that guesses saved, about; see `StepTimer`."""
        return self._timer.won_s

    # ---- guesses

    def may_draft(self) -> bool:
        self._step += 1
        self._idle += 1
        if self._step < self._wake:
            return False
        if self._adaptive:
            if not self._worth_planning:
                return False
            self._timer.looked = True
            rows = {p.req.rid: 1 + (len(p.draft.tokens) if p.draft else 0) for p in self._last}
            self._policy.launched(rows)
            self._planned_s, self._looking_s = self._clock(), 0.0
        self._idle = 0
        self._wake = self._step + LONGEST_PAUSE  # `draft` brings it forward
        return True

    def draft(self, req: Req, most: int) -> Draft | None:
        followed = self._followed.get(req)
        if followed is None:
            followed = self._followed[req] = _Followed(Acceptance(self._of_all))
        count = 0
        if self._step >= followed.look_at and (followed.pays or self._may_look):
            begun_s = self._clock() if self._adaptive else 0.0
            reach = followed.reach if self._adaptive else self._most
            count = self._look(req, followed, min(most, self._most, reach))
            if self._adaptive:
                followed.reach = count + REACH
                self._looked(followed, self._clock() - begun_s, pays=count > 0)
            followed.look_at = self._aligned(followed.pause)
        self._wake = min(self._wake, followed.look_at)
        if not count:
            return None
        self.counts.drafts += 1
        return followed.proposal.draft(count)

    @property
    def _worth_planning(self) -> bool:
        """Whether a step is to be planned with guesses, which takes longer."""
        return self._timer.may_guess and (self._paying > 0 or self._looks.worth_it)

    @property
    def _passes_over(self) -> bool:
        """Whether the step is one of those that are not timed: all are plain, and know nothing."""
        return self._idle >= TIMED and self._idle % TIMED_EVERY >= TIMED

    @property
    def _may_look(self) -> bool:
        """Whether a look may be in vain."""
        return not self._adaptive or self._looks.allowed

    def _looked(self, followed: _Followed, seconds: float, *, pays: bool) -> None:
        """What a look took, and what came of it."""
        self._looks.looked(seconds, in_vain=not pays)
        self._looking_s += seconds
        followed.pause = 1 if pays else self._pause(followed)
        self._paying += pays - followed.pays
        followed.pays = pays

    def _look(self, req: Req, followed: _Followed, most: int) -> int:
        """Compare the last proposal with what came, make a new one; guesses worth verifying."""
        length, last = req.tokens.length, followed.proposal
        if last.tokens and length > followed.length:
            came = req.tokens.view(followed.length, length)[: len(last.tokens)].tolist()
            if followed.pays:
                self._looks.won(len(came) - 1)
            if last.parents:
                settle_tree(followed.acceptance, last.tokens, last.parents, came)
            else:
                settle(followed.acceptance, last.each_grade(), last.tokens, came)
        followed.proposal, followed.length = self._propose(req, most), length
        count = len(followed.proposal.tokens)
        if not count:
            return 0
        found = followed.proposal
        if found.parents:  # all of a tree, or none
            grades = rising(0, depth_of(found))
            return count if self._policy.count(req.rid, grades, followed.acceptance) else 0
        return self._policy.count(req.rid, found.each_grade(), followed.acceptance)

    def _pause(self, followed: _Followed) -> int:
        """Steps to the next look after one in vain."""
        followed.looks += not followed.proposal.tokens
        if not followed.proposal.tokens and followed.looks <= FIRST_LOOKS:
            return 1
        return min(2 * followed.pause, self._longest_pause())

    def _longest_pause(self) -> int:
        """Steps between looks so that those at all requests take little of the time."""
        if not self._costs.known:
            return 1
        step_s = self._costs.seconds(self._timer.num_reqs)
        wanted = self._looks.look_s * self._timer.num_reqs / (STEPS_SHARE * step_s)
        pause = 1
        while pause < min(wanted, LONGEST_PAUSE):
            pause *= 2
        return pause

    def _propose(self, req: Req, most: int) -> Proposal:
        """What the drafter says, if it can be used."""
        self.counts.looks += 1
        try:
            found = self._drafter.propose(req, most)
            check(found, most, self._vocab_size)
        except FAILURES:
            self.counts.failures += 1
            if self.counts.failures == 1:
                logger.exception("the drafter failed; further failures are only counted")
            return NOTHING
        return found

    def _aligned(self, pause: int) -> int:
        """Step of the next look: requests that pause as long are looked at in the same steps."""
        return self._step // pause * pause + pause

    # ---- what happened

    def on_start(self, piece: Slice) -> None:
        self._wake = 0

    def on_batch(self, batch: Batch) -> None:
        self._last = batch.slices
        if self._adaptive and not self._idle and not self._paying:
            self._looks.planned(self._clock() - self._planned_s - self._looking_s)
        if self._adaptive and not self._passes_over:
            self._timer.begin(batch)
        else:
            self._timer.pass_over()

    def on_result(self, batch: Batch, report: Any) -> None:
        if not self._passes_over:
            self._timer.end()
            self._looks.step(1 if self._idle < TIMED else TIMED_EVERY // TIMED)

    def on_finish(self, req: Req) -> None:
        followed = self._followed.pop(req, None)
        if followed is not None:
            self._paying -= followed.pays
            self._drafter.forget(req)
