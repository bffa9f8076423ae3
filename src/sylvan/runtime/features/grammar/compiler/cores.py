"""Whether the cores have time to spare, apart from what this process itself needs."""

from __future__ import annotations

import os
import time
from pathlib import Path

_WINDOW_S = 0.05  # the system counts in hundredths of a second
_STAT = Path("/proc/stat")
_REST = (3, 4)  # columns of /proc/stat: idle, waiting for a disk


class CoreWatch:
    """Looks at what other processes do, from one call of `busy_with_others` to the next.

    Args:
        stat: Where Linux counts what its processors do.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._then = _now(stat)
        self._share = 0.0

    def busy_with_others(self) -> float:
        """The share of all processor time that others took, 0 to 1; 0 where nobody counts it."""
        then, now = self._then, _now(self._stat)
        if now is None or then is None:
            return 0.0
        wall_s, busy_s, own_s = (new - old for new, old in zip(now, then, strict=True))
        if wall_s >= _WINDOW_S:
            self._then = now
            spent_s = wall_s * (os.cpu_count() or 1)
            self._share = min(1.0, max(0.0, (busy_s - own_s) / spent_s))
        return self._share


def _now(stat: Path) -> tuple[float, float, float] | None:
    """The clock, and what all processes and this one have taken of the processors, in seconds."""
    try:
        total = [int(x) for x in stat.read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    busy = sum(ticks for column, ticks in enumerate(total) if column not in _REST)
    return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()
