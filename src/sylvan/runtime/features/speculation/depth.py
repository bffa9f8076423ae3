"""Chooses one draft depth for all requests of a step, for drafters that draft for all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.acceptance import Acceptance, record_chain, record_tree
from sylvan.runtime.features.speculation.api import rising
from sylvan.runtime.features.speculation.cost import RECENT, StepCosts
from sylvan.runtime.features.speculation.policy import MIN_GAIN
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.utils.clock import Clock

LONGEST_PAUSE = 64
"""Steps between trials while drafts do not pay off."""
TRIED = 2
"""Requests in a trial."""


class CommonDepth:
    """Measures acceptance rates, and the times of steps and drafting.

    Args:
        limit: Most drafts of a request in one step.
        adaptive: Choose the depth that pays off; otherwise always `limit`.
        clock: Clock for timing.
        width: Drafts per position.

    Attributes:
        timer: Must be notified of steps.
    """

    def __init__(self, limit: int, clock: Clock, *, adaptive: bool, width: int = 1) -> None:
        self._limit, self._adaptive = limit, adaptive
        self._costs = StepCosts()
        self.timer = StepTimer(self._costs, clock)
        self._draft_s: deque[float] = deque(maxlen=RECENT)  # seconds per additional depth
        self._of_all = Acceptance()
        self._rows = [float(depth * width) for depth in range(limit + 1)]  # by depth
        self._followed: dict[Req, Acceptance] = {}

    @property
    def followed(self) -> Sequence[Req]:
        """The requests that are drafted for."""
        return list(self._followed)

    def follow(self, req: Req) -> None:
        """Start following `req`; it may have ended since that was decided."""
        if req.generates and req.finish is None and req not in self._followed:
            self._followed[req] = Acceptance(self._of_all)

    def forget(self, req: Req) -> None:
        """Stop following `req`."""
        self._followed.pop(req, None)

    def record(
        self, req: Req, tokens: Sequence[int], known: int, parents: Sequence[int] = ()
    ) -> None:
        """Compare drafts, made when this many tokens were known, with the actual tokens."""
        if req in self._followed and req.tokens.length > known:
            actual = req.tokens.view(known, req.tokens.length)[: len(tokens)].tolist()
            if parents:
                record_tree(self._followed[req], tokens, parents, actual)
            else:
                record_chain(self._followed[req], rising(0, len(tokens)), tokens, actual)

    def drafted(self, depth: int, rows: int) -> None:
        """Record the rows that drafts of this depth took for one request."""
        self._rows[depth] += (rows - self._rows[depth]) / 8

    def record_draft_time(self, seconds: float, depth: int) -> None:
        """Record the time of drafting to this depth for all requests that wanted some."""
        self._draft_s.append(seconds / depth)

    def of(self, reqs: Sequence[Req]) -> int:
        """Return the number of drafts for each request that maximises tokens per second."""
        if not self._adaptive:
            return self._limit
        if not (self._costs.known and self._draft_s and self.timer.drafting_pays):
            return 0
        # the first drafting includes reading the prompt, so it does not predict the next time
        draft_s = sorted(self._draft_s)[(len(self._draft_s) - 1) // 2]
        expected = [self._followed[req].expected(0, self._limit) for req in reqs]
        rates = [
            sum(tokens[depth] for tokens in expected)
            / (self._costs.seconds(round(len(reqs) * (1 + self._rows[depth]))) + depth * draft_s)
            for depth in range(self._limit + 1)
        ]
        best = max(range(self._limit + 1), key=rates.__getitem__)
        return best if rates[best] > rates[0] * (1 + MIN_GAIN) else 0


class Pauses:
    """Schedules retries while drafts do not pay off: ever less often."""

    def __init__(self) -> None:
        self._step = self._wake = 0
        self._pause = 1

    def due(self) -> bool:
        """Whether to retry in this step; called once per step."""
        self._step += 1
        return self._step >= self._wake

    def record_retry(self, *, pays: bool) -> None:
        """Record the result of a retry."""
        self._pause = 1 if pays else min(2 * self._pause, LONGEST_PAUSE)
        self._wake = self._step + self._pause
