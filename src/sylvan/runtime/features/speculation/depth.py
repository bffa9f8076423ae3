"""How far to guess where all requests of a step are guessed for at once: equally far, as pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.acceptance import Acceptance, settle, settle_tree
from sylvan.runtime.features.speculation.api import rising
from sylvan.runtime.features.speculation.cost import RECENT, StepCosts
from sylvan.runtime.features.speculation.policy import LEAST_GAIN
from sylvan.runtime.features.speculation.timing import StepTimer
from sylvan.utils.clock import Clock

LONGEST_PAUSE = 64
"""Steps from one trial to the next where guesses are not worth it."""
TRIED = 2
"""Requests of a trial."""


class CommonDepth:
    """Measures how often guesses are right, and what steps and guesses take.

    Args:
        most: Guesses of a request in one step.
        adaptive: As many as pay; else always `most`.
        clock: For times.
        width: Guesses for each position.

    Attributes:
        timer: To be told of steps.
    """

    def __init__(self, most: int, clock: Clock, *, adaptive: bool, width: int = 1) -> None:
        self._most, self._adaptive = most, adaptive
        self._costs = StepCosts()
        self.timer = StepTimer(self._costs, clock)
        self._guess_s: deque[float] = deque(maxlen=RECENT)  # for one more guess of each request
        self._of_all = Acceptance()
        self._rows = [float(depth * width) for depth in range(most + 1)]  # of guesses so deep
        self._followed: dict[Req, Acceptance] = {}

    @property
    def followed(self) -> Sequence[Req]:
        """Requests that are guessed for."""
        return list(self._followed)

    def follow(self, req: Req) -> None:
        """`req` begins; it may have ended since that was decided."""
        if req.generates and req.finish is None and req not in self._followed:
            self._followed[req] = Acceptance(self._of_all)

    def forget(self, req: Req) -> None:
        """`req` has ended."""
        self._followed.pop(req, None)

    def settle(
        self, req: Req, tokens: Sequence[int], known: int, parents: Sequence[int] = ()
    ) -> None:
        """Compare guesses, made when so many tokens were known, with what came."""
        if req in self._followed and req.tokens.length > known:
            came = req.tokens.view(known, req.tokens.length)[: len(tokens)].tolist()
            if parents:
                settle_tree(self._followed[req], tokens, parents, came)
            else:
                settle(self._followed[req], rising(0, len(tokens)), tokens, came)

    def drafted(self, depth: int, rows: int) -> None:
        """Guesses so deep for one request took so many rows."""
        self._rows[depth] += (rows - self._rows[depth]) / 8

    def took(self, seconds: float, guesses: int) -> None:
        """So many guesses one after another, of all requests that wanted some, took so long."""
        self._guess_s.append(seconds / guesses)

    def of(self, reqs: Sequence[Req]) -> int:
        """Guesses for each of these requests that give the most tokens a second."""
        if not self._adaptive:
            return self._most
        if not (self._costs.known and self._guess_s and self.timer.may_guess):
            return 0
        # the first time a model reads a prompt, which is not what the next guess takes
        guess_s = sorted(self._guess_s)[(len(self._guess_s) - 1) // 2]
        expected = [self._followed[req].expected(0, self._most) for req in reqs]
        rates = [
            sum(tokens[depth] for tokens in expected)
            / (self._costs.seconds(round(len(reqs) * (1 + self._rows[depth]))) + depth * guess_s)
            for depth in range(self._most + 1)
        ]
        best = max(range(self._most + 1), key=rates.__getitem__)
        return best if rates[best] > rates[0] * (1 + LEAST_GAIN) else 0


class Pauses:
    """When guesses that do not pay are tried again: less and less often."""

    def __init__(self) -> None:
        self._step = self._wake = 0
        self._pause = 1

    def due(self) -> bool:
        """Whether to look in this step; called once in each."""
        self._step += 1
        return self._step >= self._wake

    def looked(self, *, pays: bool) -> None:
        """What came of it."""
        self._pause = 1 if pays else min(2 * self._pause, LONGEST_PAUSE)
        self._wake = self._step + self._pause
