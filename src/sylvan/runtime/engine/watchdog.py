"""Distinguishes hung processes from those that were suspended together with this one."""

from __future__ import annotations

from sylvan.utils.clock import Clock, monotonic

CHECKS_PER_LIMIT = 10


class Watchdog:
    """Judges the age of a process's last heartbeat, once per interval.

    After a suspension of the process group (SIGSTOP, a sleeping laptop, a frozen container), all
    heartbeats look old although everything is well, and those in the socket
    have not been read yet. The watchdog detects this by its own checks: if one is much later than
    an interval after the last, this process did not run either. Ages then count from that
    check, so a process is judged only by time in which this one ran too.

    Args:
        limit_s: Age of the last heartbeat at which a process counts as hung.

    Attributes:
        interval_s: Interval at which the caller must check.
    """

    def __init__(self, limit_s: float, clock: Clock = monotonic) -> None:
        self.interval_s = limit_s / CHECKS_PER_LIMIT
        self._limit_s = limit_s
        self._clock = clock
        self._checked_s = self._counts_from_s = clock()

    def hangs(self, heartbeat_s: float | None) -> bool:
        """Whether a process with this last heartbeat hangs; None: it is starting."""
        now = self._clock()
        if now - self._checked_s > 2 * self.interval_s:
            self._counts_from_s = now
        self._checked_s = now
        if heartbeat_s is None:
            return False
        return now - max(heartbeat_s, self._counts_from_s) > self._limit_s
