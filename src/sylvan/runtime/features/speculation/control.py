"""Control half of speculation: asks a drafter, and has as many drafts verified as pay off."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.runtime.core.req import Batch, Draft, Req, Slice
from sylvan.runtime.features.speculation.acceptance import Acceptance, record_chain, record_tree
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
from sylvan.runtime.features.speculation.lookup_budget import STEPS_SHARE, LookupBudget
from sylvan.runtime.features.speculation.policy import DraftPolicy, FixedLength, Throughput
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.runtime.sched.capability import Capability
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 32
"""Steps between lookups of a request whose drafts do not pay off; a power of two."""
FIRST_LOOKS = 6
"""Steps of a request in which a failed lookup causes no pause: copied text, if any, usually
starts with the answer, and short answers would end before the next lookup."""


TIMED, TIMED_EVERY = 4, 32
"""One in this many steps without drafts is timed: timing all would slow a small model
noticeably."""
REACH = 6
"""Additional draft depth beyond what paid off last time: drafting takes time, too."""


@dataclass(slots=True)
class _Followed:
    """A request that may be drafted for.

    Attributes:
        proposal: The newest proposal, verified or only compared; made after `length` tokens.
        looks: Consecutive lookups that found nothing.
        pause: Steps between lookups.
        look_at: Step number of the next lookup.
        pays: Its last drafts were worth verifying.
        reach: Draft depth of the next lookup.
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
    """Drafts with one drafter, verified as the chains or trees that it proposes.

    Requests whose drafts would cost more than they bring are looked up ever less often:
    their drafts are only compared with the actual tokens, and verified again once they pay off.

    Args:
        drafter: The drafter.
        limit: Most drafts of a request in one step.
        vocab_size: Upper bound of token IDs.
        adaptive: Verify what pays off, by measured acceptance and times; otherwise always `limit`.
        clock: Clock for timing.
    """

    name: ClassVar = "speculation"

    def __init__(
        self,
        drafter: Drafter,
        limit: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Clock = monotonic,
    ) -> None:
        self.counts = SpeculationCounts()
        self._drafter, self._limit, self._vocab_size = drafter, limit, vocab_size
        self._clock = clock
        self._costs = StepCosts()
        self._policy: DraftPolicy = Throughput(self._costs) if adaptive else FixedLength()
        self._adaptive = adaptive
        self._of_all = Acceptance()
        self._followed: dict[Req, _Followed] = {}
        self._step = 0
        self._wake = 0  # number of the next step with a lookup
        self._timer = StepTimer(self._costs, clock)
        self._looks = LookupBudget(self._costs, self._timer)
        self._planned_s = self._looking_s = 0.0  # when planning began, and lookups since then
        self._idle = 0  # steps since the last lookup
        self._last: Sequence[Slice] = ()  # of the step before
        self._paying = 0  # requests whose last drafts were worth verifying

    @property
    def saved_s(self) -> float:
        """Estimate of the seconds saved by drafts; see `StepTimer`."""
        return self._timer.saved_s

    # ---- drafts

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
        self._wake = self._step + LONGEST_PAUSE  # `draft` lowers it
        return True

    def draft(self, req: Req, limit: int) -> Draft | None:
        followed = self._followed.get(req)
        if followed is None:
            followed = self._followed[req] = _Followed(Acceptance(self._of_all))
        count = 0
        if self._step >= followed.look_at and (followed.pays or self._may_look_up):
            begun_s = self._clock() if self._adaptive else 0.0
            reach = followed.reach if self._adaptive else self._limit
            count = self._look(req, followed, min(limit, self._limit, reach))
            if self._adaptive:
                followed.reach = count + REACH
                self._record_lookup(followed, self._clock() - begun_s, pays=count > 0)
            followed.look_at = self._aligned(followed.pause)
        self._wake = min(self._wake, followed.look_at)
        if not count:
            return None
        self.counts.drafts += 1
        return followed.proposal.draft(count)

    @property
    def _worth_planning(self) -> bool:
        """Whether to plan a step with drafts, which takes longer."""
        return self._timer.drafting_pays and (self._paying > 0 or self._looks.worth_it)

    @property
    def _is_untimed(self) -> bool:
        """Whether the step is not timed: all of its requests are plain."""
        return self._idle >= TIMED and self._idle % TIMED_EVERY >= TIMED

    @property
    def _may_look_up(self) -> bool:
        """Whether another lookup may be in vain."""
        return not self._adaptive or self._looks.allowed

    def _record_lookup(self, followed: _Followed, seconds: float, *, pays: bool) -> None:
        """Record the time and the result of a lookup."""
        self._looks.record_lookup(seconds, futile=not pays)
        self._looking_s += seconds
        followed.pause = 1 if pays else self._pause(followed)
        self._paying += pays - followed.pays
        followed.pays = pays

    def _look(self, req: Req, followed: _Followed, limit: int) -> int:
        """Compare the last proposal with the actual tokens, make a new one; return drafts."""
        length, last = req.tokens.length, followed.proposal
        if last.tokens and length > followed.length:
            actual = req.tokens.view(followed.length, length)[: len(last.tokens)].tolist()
            if followed.pays:
                self._looks.record_accepted(len(actual) - 1)
            if last.parents:
                record_tree(followed.acceptance, last.tokens, last.parents, actual)
            else:
                record_chain(followed.acceptance, last.each_grade(), last.tokens, actual)
        followed.proposal, followed.length = self._propose(req, limit), length
        count = len(followed.proposal.tokens)
        if not count:
            return 0
        found = followed.proposal
        if found.parents:  # a tree is verified whole or not at all
            grades = rising(0, depth_of(found))
            return count if self._policy.count(req.rid, grades, followed.acceptance) else 0
        return self._policy.count(req.rid, found.each_grade(), followed.acceptance)

    def _pause(self, followed: _Followed) -> int:
        """Return the steps until the next lookup after a failed one."""
        followed.looks += not followed.proposal.tokens
        if not followed.proposal.tokens and followed.looks <= FIRST_LOOKS:
            return 1
        return min(2 * followed.pause, self._longest_pause())

    def _longest_pause(self) -> int:
        """Return the pause at which lookups of all requests take little of the time."""
        if not self._costs.known:
            return 1
        step_s = self._costs.seconds(self._timer.num_reqs)
        wanted = self._looks.lookup_s * self._timer.num_reqs / (STEPS_SHARE * step_s)
        pause = 1
        while pause < min(wanted, LONGEST_PAUSE):
            pause *= 2
        return pause

    def _propose(self, req: Req, limit: int) -> Proposal:
        """Ask the drafter; return its proposal, if it is usable."""
        self.counts.looks += 1
        try:
            found = self._drafter.propose(req, limit)
            check(found, limit, self._vocab_size)
        except FAILURES:
            self.counts.failures += 1
            if self.counts.failures == 1:
                logger.exception("the drafter failed; further failures are only counted")
            return NOTHING
        return found

    def _aligned(self, pause: int) -> int:
        """Return the step of the next lookup: requests with equal pauses are looked up together."""
        return self._step // pause * pause + pause

    # ---- results

    def on_start(self, piece: Slice) -> None:
        self._wake = 0

    def on_batch(self, batch: Batch) -> None:
        self._last = batch.slices
        if self._adaptive and not self._idle and not self._paying:
            self._looks.planned(self._clock() - self._planned_s - self._looking_s)
        if self._adaptive and not self._is_untimed:
            self._timer.begin(batch)
        else:
            self._timer.skip_timing()

    def on_result(self, batch: Batch, report: Any) -> None:
        if not self._is_untimed:
            self._timer.end()
            self._looks.step(1 if self._idle < TIMED else TIMED_EVERY // TIMED)

    def on_finish(self, req: Req) -> None:
        followed = self._followed.pop(req, None)
        if followed is not None:
            self._paying -= followed.pays
            self._drafter.forget(req)
