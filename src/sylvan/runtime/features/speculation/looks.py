"""How much time looks in vain may take: a share of the steps', and of what right guesses saved."""

from __future__ import annotations

from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.runtime.features.speculation.timing import StepTimer

STEPS_SHARE = 0.01
"""Of the time of steps, for looks in vain."""
WON_SHARE = 0.1
"""Of the time that right guesses saved, for the same: where they pay, new requests get a look."""
MOST, FEW = 64, 8
"""Looks in vain that may be saved up, and that are worth planning a step with guesses."""


class Looks:
    """An account of seconds.

    Args:
        costs: Of steps.
        timer: Knows how many requests a step has.
    """

    def __init__(self, costs: StepCosts, timer: StepTimer) -> None:
        self._costs, self._timer = costs, timer
        self._look_s = 0.0  # what a look takes
        self._planning_s = 0.0  # what planning a step with looks takes besides
        self._saved_s = 0.0
        self._spent = 0  # looks before anything is known of steps

    @property
    def look_s(self) -> float:
        """What a look takes."""
        return self._look_s

    @property
    def allowed(self) -> bool:
        """Whether one more look may be in vain."""
        return self._saved_s > 0 or self._spent < MOST

    @property
    def worth_it(self) -> bool:
        """Whether enough looks may be in vain to plan a step for them."""
        few = min(FEW, self._timer.num_reqs)
        needed = few * self._look_s + self._planning_s
        return self._saved_s >= needed or self._spent < MOST

    def step(self, count: int = 1) -> None:
        """So many steps are done."""
        if self._costs.known and self._saved_s < self._most_s:
            self._saved_s += count * STEPS_SHARE * self._costs.seconds(self._timer.num_reqs)

    def looked(self, seconds: float, *, in_vain: bool) -> None:
        """A look took so long."""
        self._look_s += (seconds - self._look_s) / 8
        if in_vain:
            self._spent += 1
            self._saved_s -= seconds

    def planned(self, seconds: float) -> None:
        """Planning a step with looks, all in vain, took so long besides them."""
        self._planning_s += (seconds - self._planning_s) / 8
        self._saved_s -= seconds

    @property
    def _most_s(self) -> float:
        return MOST * self._look_s + 2 * self._planning_s

    def won(self, tokens: int) -> None:
        """So many guesses were right."""
        if self._costs.known and self._saved_s < self._most_s:
            reqs = self._timer.num_reqs
            self._saved_s += WON_SHARE * tokens * self._costs.seconds(reqs) / reqs
