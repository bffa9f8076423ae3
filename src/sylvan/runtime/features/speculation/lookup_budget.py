"""Limits the time of futile lookups to a share of step time, and of the time saved by drafts.

A lookup asks a drafter for drafts; it is futile if the drafts are not worth verifying.
"""

from __future__ import annotations

from sylvan.runtime.features.speculation.cost import StepCosts
from sylvan.runtime.features.speculation.timing import StepTimer

STEPS_SHARE = 0.01
"""Share of step time for futile lookups."""
SAVED_TIME_SHARE = 0.1
"""Share of the time saved by drafts that futile lookups may take: it lets new requests be tried."""
MOST, FEW = 64, 8
"""Futile lookups that can be saved up, and that justify planning a step with drafts."""


class LookupBudget:
    """A budget in seconds.

    Args:
        costs: Costs of steps.
        timer: Knows the number of requests in a step.
    """

    def __init__(self, costs: StepCosts, timer: StepTimer) -> None:
        self._costs, self._timer = costs, timer
        self._look_s = 0.0  # seconds per lookup
        self._planning_s = 0.0  # additional seconds to plan a step with lookups
        self._saved_s = 0.0
        self._spent = 0  # lookups before anything is known about steps

    @property
    def lookup_s(self) -> float:
        """Seconds of a lookup."""
        return self._look_s

    @property
    def allowed(self) -> bool:
        """Whether another lookup may be futile."""
        return self._saved_s > 0 or self._spent < MOST

    @property
    def worth_it(self) -> bool:
        """Whether enough lookups may be futile to plan a step for them."""
        few = min(FEW, self._timer.num_reqs)
        needed = few * self._look_s + self._planning_s
        return self._saved_s >= needed or self._spent < MOST

    def step(self, count: int = 1) -> None:
        """Record a number of finished steps."""
        if self._costs.known and self._saved_s < self._max_s:
            self._saved_s += count * STEPS_SHARE * self._costs.seconds(self._timer.num_reqs)

    def record_lookup(self, seconds: float, *, futile: bool) -> None:
        """Record the time of a lookup."""
        self._look_s += (seconds - self._look_s) / 8
        if futile:
            self._spent += 1
            self._saved_s -= seconds

    def planned(self, seconds: float) -> None:
        """Record the additional time of planning a step with futile lookups."""
        self._planning_s += (seconds - self._planning_s) / 8
        self._saved_s -= seconds

    @property
    def _max_s(self) -> float:
        return MOST * self._look_s + 2 * self._planning_s

    def record_accepted(self, tokens: int) -> None:
        """Record accepted drafts."""
        if self._costs.known and self._saved_s < self._max_s:
            reqs = self._timer.num_reqs
            self._saved_s += SAVED_TIME_SHARE * tokens * self._costs.seconds(reqs) / reqs
