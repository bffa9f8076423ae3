"""Times steps to learn what rows cost: steps that only decode or verify drafts.

The time between two steps counts too: planning drafts and processing results takes time
that matters for small models. So a step is timed from the end of the one before it if both have
the same requests; other steps are used only if nothing else is known.
"""

from __future__ import annotations

from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.features.speculation.balance import Balances
from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.utils.clock import Clock


class StepTimer:
    """Reports step times to `costs`.

    Attributes:
        num_reqs: Requests of the last timed step.
        saved_s: Time saved by accepted drafts, minus the cost of drafting and verifying; an
            estimate, because the time of plain steps is estimated, too.
        looked: Set if drafts are looked up before the next step.
    """

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self.num_reqs, self.saved_s, self.looked = 1, 0.0, False
        self._costs, self._clock = costs, clock
        self._balances = Balances()
        self._besides_s = 0.0  # before this step
        self._number = 0  # number of steps so far
        self._begun: tuple[int, float, bool] | None = None  # rows, time, whether it follows another
        self._reqs: list[Req] = []  # of the last timed step
        self._ended_s: float | None = None
        self._verified: list[tuple[Req, int]] = []  # and the accepted drafts of each by then

    @property
    def drafting_pays(self) -> bool:
        """Whether drafting has paid off overall, for as many requests as the last step had."""
        return self._number + 1 >= self._balances.of(self.num_reqs).until

    def begin(self, batch: Batch) -> bool:
        """Record that `batch` is launched; return whether its step is timed."""
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

    def skip_timing(self) -> None:
        """Record that an untimed step is launched."""
        self._begun = self._ended_s = None
        self._number += 1

    def other_work(self, seconds: float) -> None:
        """Exclude time since the last step that is accounted for separately."""
        self.saved_s -= seconds
        self._besides_s += seconds
        if self._ended_s is not None:
            self._ended_s += seconds

    def end(self, besides_s: float = 0.0) -> None:
        """Record the end of a step; exclude this many of its seconds."""
        self._ended_s = None
        self.saved_s -= besides_s
        if self._begun is not None:
            rows, begun_s, follows = self._begun
            self._begun, self._ended_s = None, self._clock()
            took_s = self._ended_s - begun_s - besides_s
            if rows > self.num_reqs and self._costs.known:
                self.saved_s -= took_s - self._costs.seconds(self.num_reqs)
            if follows or not self._costs.measured(rows):
                self._costs.record(rows, took_s)
            self._record_balance(rows, took_s, self._besides_s + besides_s, follows=follows)
        self._besides_s, self.looked = 0.0, False

    def _record_balance(self, rows: int, took_s: float, besides_s: float, *, follows: bool) -> None:
        balance = self._balances.of(self.num_reqs)
        if follows and (self.looked or besides_s or rows > self.num_reqs):
            balance.record_drafting(took_s + besides_s, self._number)
        elif follows:
            balance.record_plain(took_s)

    def _count_right(self) -> None:
        """Count accepted drafts of the last step: tokens that needed no step of their own."""
        if self._verified and self._costs.known:
            right = sum(_right(req) - before for req, before in self._verified)
            self.saved_s += right * self._costs.seconds(self.num_reqs) / self.num_reqs
            self._balances.of(self.num_reqs).record_accepted(right / self.num_reqs)
        self._verified = []


def _right(req: Req) -> int:
    """Return the accepted drafts of a request so far."""
    return req.drafts.accepted if req.drafts else 0
