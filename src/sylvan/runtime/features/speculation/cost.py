"""What a step costs by its rows: measured, since no two machines and models agree."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ROW_COST = 0.03
"""What a row more adds to a step, relative to it, before that was measured: worth a try."""
NEW_WEIGHT = 0.15
"""Of a measurement, against those before it."""
SHORTEST_S = 1e-6
"""A clock may not see that time passed."""
OUTLIER = 3.0
"""A step that took so many times what was expected was held up by something else."""
MOST_OUTLIERS = 8
"""So many in a row are the new truth."""
REMEMBERED = 512
"""Steps; what was not measured again by then is forgotten, since contexts have grown or ended."""


@dataclass(slots=True)
class _Measured:
    seconds: float
    step: int  # in which it was measured last


class StepCosts:
    """Seconds of a step of decodes and guesses, which never fall as rows are added."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}  # by rows
        self._rows: list[int] = []  # ascending
        self._curve: list[float] = []  # seconds at `_rows`, never falling
        self._steps = self._outliers = 0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._rows)

    def saw(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._steps += 1
        seconds = max(seconds, SHORTEST_S)
        late = self.known and seconds > OUTLIER * self.seconds(rows)
        self._outliers = self._outliers + 1 if late else 0
        if late and self._outliers < MOST_OUTLIERS:
            return
        found = self._measured.setdefault(rows, _Measured(seconds, self._steps))
        found.seconds += (1.0 if late else NEW_WEIGHT) * (seconds - found.seconds)
        found.step = self._steps
        self._draw()

    def seconds(self, rows: int) -> float:
        """Expected of a step of so many rows, in between by a straight line."""
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
        oldest = self._steps - REMEMBERED
        self._measured = {r: m for r, m in self._measured.items() if m.step > oldest}
        self._rows = sorted(self._measured)
        self._curve = []
        for rows in self._rows:
            before = self._curve[-1] if self._curve else 0.0
            self._curve.append(max(before, self._measured[rows].seconds))
