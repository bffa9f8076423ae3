"""Times the steps that tell what rows cost: those in which all decode or have guesses verified.

What lies between two steps counts too: planning guesses and taking in what they brought takes its
time, which small models feel. So a step is timed from the end of the one before it where both are
of the same requests; others are believed only where nothing else is known.
"""

from __future__ import annotations

from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.features.speculation.balance import Balances
from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.utils.clock import Clock


class StepTimer:
    """Tells `costs` what steps took.

    Attributes:
        num_reqs: Of the last step that was timed.
        won_s: What right guesses saved, less what guessing and verifying took: about, since what
            plain steps would have taken is an estimate.
        looked: Set where guesses are looked for before the step that comes.
    """

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self.num_reqs, self.won_s, self.looked = 1, 0.0, False
        self._costs, self._clock = costs, clock
        self._balances = Balances()
        self._besides_s = 0.0  # before this step
        self._number = 0  # of steps so far
        self._begun: tuple[int, float, bool] | None = None  # rows, when, whether after another
        self._reqs: list[Req] = []  # of the last step that was timed
        self._ended_s: float | None = None
        self._verified: list[tuple[Req, int]] = []  # and the right guesses of each by then

    @property
    def may_guess(self) -> bool:
        """Whether guessing has paid, all in all, for as many requests as the last step had."""
        return self._number + 1 >= self._balances.of(self.num_reqs).until

    def begin(self, batch: Batch) -> bool:
        """`batch` is launched; whether its step is timed."""
        before, self._begun = self._reqs, None
        self._reqs = []
        self._number += 1
        slices = batch.slices
        self._count_right()
        if not batch.decodes:
            self._verified = [(p.req, _right(p.req)) for p in slices if p.draft]
        if not slices:
            return False
        rows = len(slices)
        if not batch.decodes:
            if any(piece.stop - piece.start > 1 for piece in slices):
                return False
            rows += sum(len(piece.draft.tokens) for piece in slices if piece.draft)
        self._reqs = [piece.req for piece in slices]
        self.num_reqs = len(slices)
        if self._ended_s is not None and before == self._reqs:
            self._begun = rows, self._ended_s, True
        else:
            self._begun = rows, self._clock(), False
        return True

    def pass_over(self) -> None:
        """A step is launched, and is not timed."""
        self._begun = self._ended_s = None
        self._number += 1

    def besides(self, seconds: float) -> None:
        """So much of the time since the last step went into something that is counted by itself."""
        self.won_s -= seconds
        self._besides_s += seconds
        if self._ended_s is not None:
            self._ended_s += seconds

    def end(self, besides_s: float = 0.0) -> None:
        """The step is done; so many of its seconds went into something else than its rows."""
        self._ended_s = None
        self.won_s -= besides_s
        if self._begun is not None:
            rows, begun_s, follows = self._begun
            self._begun, self._ended_s = None, self._clock()
            took_s = self._ended_s - begun_s - besides_s
            if rows > self.num_reqs and self._costs.known:
                self.won_s -= took_s - self._costs.seconds(self.num_reqs)
            if follows or not self._costs.measured(rows):
                self._costs.saw(rows, took_s)
            self._weigh(rows, took_s, self._besides_s + besides_s, follows=follows)
        self._besides_s, self.looked = 0.0, False

    def _weigh(self, rows: int, took_s: float, besides_s: float, *, follows: bool) -> None:
        balance = self._balances.of(self.num_reqs)
        if follows and (self.looked or besides_s or rows > self.num_reqs):
            balance.guessing(took_s + besides_s, self._number)
        elif follows:
            balance.plain(took_s)

    def _count_right(self) -> None:
        """Each right guess of the last step was a token that needed no step of its own."""
        if self._verified and self._costs.known:
            right = sum(_right(req) - before for req, before in self._verified)
            self.won_s += right * self._costs.seconds(self.num_reqs) / self.num_reqs
            self._balances.of(self.num_reqs).right(right / self.num_reqs)
        self._verified = []


def _right(req: Req) -> int:
    """Guesses for it that were right so far."""
    return req.drafts.accepted if req.drafts else 0
