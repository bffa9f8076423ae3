"""What a step costs by its rows: measured, since no two machines and models agree."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

ROW_COST = 0.03
"""What a row more adds to a step, relative to it, before that was measured: worth a try."""
ROW_COST_WEIGHT = 2
"""`ROW_COST` counts as many measurements: one step that was held up must not end all trials."""
RECENT = 8
"""Measurements of as many rows of which the median counts."""
REMEMBERED = 256
"""Steps; what was not measured again by then is forgotten, since contexts have grown or ended."""
SHORTEST_S = 1e-6
"""A clock may not see that time passed."""


@dataclass(slots=True)
class _Measured:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds
    step: int = 0  # in which it was measured last

    @property
    def median(self) -> float:
        return sorted(self.recent)[(len(self.recent) - 1) // 2]


class StepCosts:
    """Seconds of a step of decodes and guesses, which never fall as rows are added."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by rows
        self._rows: list[int] = []  # ascending
        self._curve: list[float] = []  # seconds at `_rows`, never falling
        self._drawn = True
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)

    def saw(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._steps += 1
        found = self._measured.setdefault(rows, _Measured())
        found.recent.append(max(seconds, SHORTEST_S))
        found.step = self._steps
        self._drawn = False

    def seconds(self, rows: int) -> float:
        """Expected of a step of so many rows, in between by a straight line."""
        if not self._drawn:
            self._draw()
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            return self._curve[at]
        if at == 0:
            return self._curve[0] / (1 + ROW_COST * (self._rows[0] - rows))
        before, known = self._rows[at - 1], self._curve[at - 1]
        if at == len(self._rows):
            return known * (1 + ROW_COST * (rows - before))
        share = (rows - before) / (self._rows[at] - before)
        return known + share * (self._curve[at] - known)

    def _draw(self) -> None:
        self._drawn = True
        oldest = self._steps - REMEMBERED
        self._measured = {r: m for r, m in self._measured.items() if m.step > oldest}
        self._rows = sorted(self._measured)
        self._curve = []
        for at, rows in enumerate(self._rows):
            measured = self._measured[rows]
            seconds, count = measured.median, len(measured.recent)
            if at:
                before = self._curve[-1]
                assumed = before * (1 + ROW_COST * (rows - self._rows[at - 1]))
                seconds = (count * seconds + ROW_COST_WEIGHT * assumed) / (count + ROW_COST_WEIGHT)
                seconds = max(seconds, before)
            self._curve.append(seconds)
