"""Times the steps that tell what rows cost: those in which all decode or have guesses verified."""

from __future__ import annotations

from sylvan.runtime.core.req import Batch
from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.utils.clock import Clock


class StepTimer:
    """Tells `costs` what steps took.

    Attributes:
        num_reqs: Of the last step that was timed.
    """

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self.num_reqs = 1
        self._costs, self._clock = costs, clock
        self._begun: tuple[int, float] | None = None  # rows, and when

    def begin(self, batch: Batch) -> bool:
        """`batch` is launched; whether its step is timed."""
        self._begun = None
        slices = batch.slices
        if not slices:
            return False
        rows = len(slices)
        if not batch.decodes:
            if any(piece.stop - piece.start > 1 for piece in slices):
                return False
            rows += sum(len(piece.draft.tokens) for piece in slices if piece.draft)
        self.num_reqs = len(slices)
        self._begun = rows, self._clock()
        return True

    def end(self, besides_s: float = 0.0) -> None:
        """The step is done; so many of its seconds went into something else than its rows."""
        if self._begun is not None:
            rows, begun_s = self._begun
            self._costs.saw(rows, self._clock() - begun_s - besides_s)
            self._begun = None
