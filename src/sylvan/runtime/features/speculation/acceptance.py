"""Acceptance rates of drafts: measured per request, with the global rate as a prior."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.features.speculation.api import GRADES, SHARE_GRADES, rising

INITIAL_RATE = 0.5
"""Acceptance rate before anything is known: high enough to try."""
ALL_GRADES = GRADES + SHARE_GRADES
ALL_WINDOW, OWN_WINDOW = 512.0, 64.0
"""Drafts per grade that are remembered."""
OWN_WEIGHT = 4.0
"""Weight of the global rate, in drafts of the request itself."""
NEIGHBOUR_WEIGHT = 4.0
"""Weight of a grade's rate for the next grade, in drafts."""


class Acceptance:
    """Acceptance rate by grade.

    Args:
        parent: The global rate; None: this is it.
    """

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._window = ALL_WINDOW if parent is None else OWN_WINDOW
        self._right = [0.0] * ALL_GRADES
        self._tried = [0.0] * ALL_GRADES
        self._known: list[float | None] = [None] * ALL_GRADES  # of `chance`, without a prior

    def record(self, grade: int, *, right: bool) -> None:
        """Record that a draft of that grade was accepted or rejected."""
        grade = min(grade, ALL_GRADES - 1)
        if self._tried[grade] >= self._window:
            self._right[grade] /= 2
            self._tried[grade] /= 2
        self._right[grade] += right
        self._tried[grade] += 1
        self._known[grade : grade + 2] = (None,) * len(self._known[grade : grade + 2])
        if self._parent is not None:
            self._parent.record(grade, right=right)

    def chance(self, grade: int) -> float:
        """Return the probability that a draft of this grade is accepted after its predecessors."""
        grade = min(grade, ALL_GRADES - 1)
        if self._parent is not None:
            start = self._parent.chance(grade)
            return (self._right[grade] + OWN_WEIGHT * start) / (self._tried[grade] + OWN_WEIGHT)
        found = self._known[grade]
        if found is None:
            found = self._known[grade] = self._of_all(grade)
        return found

    def _of_all(self, grade: int) -> float:
        if grade >= GRADES:
            start, weight = (grade - GRADES + 0.5) / SHARE_GRADES, NEIGHBOUR_WEIGHT
        elif grade:
            start, weight = self._of(grade - 1), NEIGHBOUR_WEIGHT
        else:
            start, weight = INITIAL_RATE, 1.0
        return (self._right[grade] + weight * start) / (self._tried[grade] + weight)

    def _of(self, grade: int) -> float:
        """Return the rate of one grade alone."""
        return (self._right[grade] + INITIAL_RATE) / (self._tried[grade] + 1.0)

    def expected(self, grade: int, count: int) -> list[float]:
        """Return the expected tokens of a step with 0, 1, ... `count` drafts from this grade on."""
        found, chance = [1.0], 1.0
        for each in rising(grade, count):
            chance *= self.chance(each)
            found.append(found[-1] + chance)
        return found


def record_tree(
    acceptance: Acceptance, drafts: Sequence[int], parents: Sequence[int], actual: Sequence[int]
) -> None:
    """Record how deep a tree of drafts was accepted, counting any draft at each depth."""
    last = -1
    for depth, token in enumerate(actual):
        level = [i for i, parent in enumerate(parents) if parent == last]
        if not level:
            return
        right = next((i for i in level if drafts[i] == token), None)
        acceptance.record(min(depth, GRADES - 1), right=right is not None)
        if right is None:
            return
        last = right


def record_chain(
    acceptance: Acceptance, grades: Sequence[int], drafts: Sequence[int], actual: Sequence[int]
) -> None:
    """Record which drafts were accepted, up to the first rejected one, from the actual tokens."""
    for grade, draft, token in zip(grades, drafts, actual, strict=False):
        acceptance.record(grade, right=draft == token)
        if draft != token:
            return
