"""Chooses how many drafts each request gets: as many as speed up the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sylvan.runtime.features.speculation.acceptance import Acceptance
from sylvan.runtime.features.speculation.cost import StepCosts

MIN_GAIN = 0.02
"""Factor by which drafts must increase tokens per second: estimates are not exact, and drafting
is not free."""

MIN_CHANCE = 0.02
"""Acceptance probability below which a draft and those after it are not worth verifying."""


class DraftPolicy(Protocol):
    """Decides request by request, before each step."""

    def count(self, rid: str, grades: Sequence[int], acceptance: Acceptance) -> int:
        """Return how many consecutive drafts of these grades to verify."""
        ...

    def launched(self, rows: dict[str, int]) -> None:
        """Record that a step computes this many rows of each request."""
        ...


class FixedLength:
    """Implements `DraftPolicy`: always all drafts."""

    def count(self, rid: str, grades: Sequence[int], acceptance: Acceptance) -> int:
        del rid, acceptance
        return len(grades)

    def launched(self, rows: dict[str, int]) -> None:
        pass


class Throughput:
    """Implements `DraftPolicy`: maximises the step's tokens per second, other requests unchanged.

    Since each choice raises the same number, that of the whole batch, choosing for one request
    after the other works too.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._plans: dict[str, tuple[int, float]] = {}  # rows and expected tokens of each request
        self._rows, self._tokens = 0, 0.0  # totals

    def count(self, rid: str, grades: Sequence[int], acceptance: Acceptance) -> int:
        rows, tokens = self._plans.get(rid, (0, 0.0))
        rows, tokens = self._rows - rows, self._tokens - tokens
        best, wanted = 0, 1.0
        if self._costs.known:
            seconds = self._costs.seconds
            wanted_rate = (tokens + 1.0) / seconds(rows + 1) * (1 + MIN_GAIN)
            chance = mine = 1.0
            for count, grade in enumerate(grades, 1):
                chance *= acceptance.chance(grade)
                mine += chance
                rate = (tokens + mine) / seconds(rows + 1 + count)
                if rate > wanted_rate:
                    best, wanted, wanted_rate = count, mine, rate
                if chance < MIN_CHANCE:
                    break
        self._plan(rid, 1 + best, wanted)
        return best

    def launched(self, rows: dict[str, int]) -> None:
        plans = self._plans
        self._plans = {rid: plans.get(rid, (count, 1.0)) for rid, count in rows.items()}
        self._rows = sum(count for count, _ in self._plans.values())
        self._tokens = sum(tokens for _, tokens in self._plans.values())

    def _plan(self, rid: str, rows: int, tokens: float) -> None:
        old = self._plans.get(rid, (0, 0.0))
        self._plans[rid] = rows, tokens
        self._rows += rows - old[0]
        self._tokens += tokens - old[1]
