"""The cost of a step by its number of rows: measured, since it depends on machine and model."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

ROW_COST = 0.03
"""Prior for the relative cost of one more row: low enough to try."""
ROW_COST_WEIGHT = 2
"""Weight of `ROW_COST` in measurements, decreasing with more of them: one disturbed step must not
end all trials."""
RECENT = 8
"""Measurements per number of rows, of which the lower quartile counts."""
REMEMBERED = 256
"""Steps after which a measurement expires, since contexts have grown or ended."""
SAME = 0.02
"""Relative change of a quartile that leaves the curve unchanged."""
SHORTEST_S = 1e-6
"""Clocks may not resolve a short time."""


@dataclass(slots=True)
class _Measured:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds
    step: int = 0  # step of the last measurement
    usual: float = 0.0  # lower quartile: disturbances only ever make steps longer
    drawn: float = 0.0  # `usual` when the curve was last computed

    def record(self, seconds: float, step: int) -> bool:
        """Add a measurement; return whether the curve may stay."""
        self.recent.append(seconds)
        self.step = step
        self.usual = sorted(self.recent)[(len(self.recent) - 1) // 4]
        many = len(self.recent) == RECENT
        return many and abs(self.usual - self.drawn) <= SAME * self.drawn


@dataclass(frozen=True, slots=True)
class _Level:
    """A flat part of the curve: fewer rows cannot take longer than more rows, that is noise."""

    seconds: float
    count: int  # of measurements
    points: int  # of the curve

    def joined(self, other: _Level) -> _Level:
        """Return the mean of all measurements of both."""
        count = self.count + other.count
        seconds = (self.count * self.seconds + other.count * other.seconds) / count
        return _Level(seconds, count, self.points + other.points)


class StepCosts:
    """Seconds of a step of decodes and drafts, non-decreasing in the number of rows."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by rows
        self._rows: list[int] = []  # ascending
        self._curve: list[float] = []  # seconds at `_rows`, non-decreasing
        self._drawn = True
        self._expected: dict[int, float] = {}  # results of `seconds` since the curve was computed
        self._drawn_at = 0  # step
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)

    def measured(self, rows: int) -> bool:
        """Whether a step of this many rows was measured."""
        return rows in self._measured

    def record(self, rows: int, seconds: float) -> None:
        """Record the time of a step of this many rows."""
        self._steps += 1
        found = self._measured.get(rows)
        if found is None:
            found = self._measured[rows] = _Measured()
        same = found.record(max(seconds, SHORTEST_S), self._steps)
        if not same or self._steps - self._drawn_at >= REMEMBERED // 4:
            self._drawn = False

    def seconds(self, rows: int) -> float:
        """Predict the time of a step of this many rows, by linear interpolation."""
        if not self._drawn:
            self._draw()
        found = self._expected.get(rows)
        if found is None:
            found = self._expected[rows] = self._on_curve(rows)
        return found

    def _on_curve(self, rows: int) -> float:
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
        self._drawn, self._drawn_at = True, self._steps
        self._expected.clear()
        oldest = self._steps - REMEMBERED
        self._measured = {r: m for r, m in self._measured.items() if m.step > oldest}
        self._rows = sorted(self._measured)
        levels: list[_Level] = []
        for at, rows in enumerate(self._rows):
            measured = self._measured[rows]
            measured.drawn = measured.usual
            seconds, count = measured.usual, len(measured.recent)
            if at and (prior := ROW_COST_WEIGHT + 1 - count) > 0:
                assumed = levels[-1].seconds * (1 + ROW_COST * (rows - self._rows[at - 1]))
                seconds = (count * seconds + prior * assumed) / (count + prior)
            levels.append(_Level(seconds, count, 1))
            while len(levels) > 1 and levels[-2].seconds > levels[-1].seconds:
                levels[-2:] = [levels[-2].joined(levels[-1])]
        self._curve = [level.seconds for level in levels for _ in range(level.points)]
