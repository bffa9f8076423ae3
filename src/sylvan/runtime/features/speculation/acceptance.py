"""How often guesses are right: measured for each request, and for all of them as a start."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.features.speculation.api import GRADES, SHARE_GRADES, rising

FIRST_GUESS = 0.5
"""Share of right guesses before anything is known: enough to try."""
ALL_GRADES = GRADES + SHARE_GRADES
ALL_WINDOW, OWN_WINDOW = 512.0, 64.0
"""Guesses of a grade that are remembered."""
OWN_WEIGHT = 4.0
"""What all requests tell counts as many guesses of one's own."""
NEIGHBOUR_WEIGHT = 4.0
"""What a grade tells of the next one counts as many guesses."""


class Acceptance:
    """Share of right guesses, by grade.

    Args:
        parent: What is known of all requests; None: this is that.
    """

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._window = ALL_WINDOW if parent is None else OWN_WINDOW
        self._right = [0.0] * ALL_GRADES
        self._tried = [0.0] * ALL_GRADES
        self._known: list[float | None] = [None] * ALL_GRADES  # of `chance`, where nothing is above

    def saw(self, grade: int, *, right: bool) -> None:
        """A guess of that grade was right, or wrong."""
        grade = min(grade, ALL_GRADES - 1)
        if self._tried[grade] >= self._window:
            self._right[grade] /= 2
            self._tried[grade] /= 2
        self._right[grade] += right
        self._tried[grade] += 1
        self._known[grade : grade + 2] = (None,) * len(self._known[grade : grade + 2])
        if self._parent is not None:
            self._parent.saw(grade, right=right)

    def chance(self, grade: int) -> float:
        """That a guess of this grade is right, if those before it were."""
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
            start, weight = FIRST_GUESS, 1.0
        return (self._right[grade] + weight * start) / (self._tried[grade] + weight)

    def _of(self, grade: int) -> float:
        """Of one grade alone."""
        return (self._right[grade] + FIRST_GUESS) / (self._tried[grade] + 1.0)

    def expected(self, grade: int, count: int) -> list[float]:
        """Tokens that a step brings with the first 0, 1, ... `count` guesses from this grade on."""
        found, chance = [1.0], 1.0
        for each in rising(grade, count):
            chance *= self.chance(each)
            found.append(found[-1] + chance)
        return found


def settle_tree(
    acceptance: Acceptance, guesses: Sequence[int], parents: Sequence[int], came: Sequence[int]
) -> None:
    """Tell how deep a tree of guesses was right: at each depth by any of its guesses."""
    last = -1
    for depth, token in enumerate(came):
        level = [i for i, parent in enumerate(parents) if parent == last]
        if not level:
            return
        right = next((i for i in level if guesses[i] == token), None)
        acceptance.saw(min(depth, GRADES - 1), right=right is not None)
        if right is None:
            return
        last = right


def settle(
    acceptance: Acceptance, grades: Sequence[int], guesses: Sequence[int], came: Sequence[int]
) -> None:
    """Tell which guesses were right, up to the first wrong one, by what came instead."""
    for grade, guess, token in zip(grades, guesses, came, strict=False):
        acceptance.saw(grade, right=guess == token)
        if guess != token:
            return
