"""Whether the cores have time to spare, apart from what we need ourselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_WINDOW_S = 0.05  # the system counts in hundredths of a second
_STAT = Path("/proc/stat")
_REST = (3, 4)  # columns of /proc/stat: idle, waiting for a disk
_TIMES = slice(11, 15)  # of /proc/PID/stat behind the name: of the process and of its children


class CoreWatch:
    """Looks at what other processes do, from one call of `busy_with_others` to the next.

    Args:
        stat: Where Linux counts what its processors do.
        helpers: Processes that are no others: what they take they would leave at once.
    """

    def __init__(
        self, stat: Path = _STAT, helpers: Callable[[], Sequence[int]] = lambda: ()
    ) -> None:
        self._stat, self._helpers = stat, helpers
        self._then = self._now()
        self._share = 0.0

    def busy_with_others(self) -> float:
        """The share of all processor time that others took, 0 to 1; 0 where nobody counts it."""
        then, now = self._then, self._now()
        if now is None or then is None:
            return 0.0
        wall_s, busy_s, own_s = (new - old for new, old in zip(now, then, strict=True))
        if wall_s >= _WINDOW_S:
            self._then = now
            spent_s = wall_s * (os.cpu_count() or 1)
            self._share = min(1.0, max(0.0, (busy_s - own_s) / spent_s))
        return self._share

    def _now(self) -> tuple[float, float, float] | None:
        """The clock, and what all and our own processes took of the processors, in seconds."""
        try:
            total = [int(x) for x in self._stat.read_text().partition("\n")[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        busy = sum(ticks for column, ticks in enumerate(total) if column not in _REST)
        helped = sum(map(_ticks_of, self._helpers()))
        second = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy / second, time.process_time() + helped / second


def _ticks_of(pid: int) -> int:
    """What a process and those of its children that have ended have taken."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[_TIMES]))
    except (OSError, ValueError):  # it has ended
        return 0
