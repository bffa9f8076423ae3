"""Time as an argument: real in production, virtual in tests and simulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]
"""Seconds since some fixed point; never goes back."""

monotonic: Clock = time.monotonic

process_cpu: Clock = time.process_time
"""CPU time of this process in seconds, summed over its threads."""


def unix_time() -> float:
    """Wall-clock seconds since the Unix epoch, for files and other machines; may go back."""
    return datetime.now(tz=UTC).timestamp()


class VirtualClock:
    """A clock that moves only when advanced."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward."""
        self._now_s += seconds
