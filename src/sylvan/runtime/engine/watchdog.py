"""Tells processes that hang from processes that were suspended together with this one."""

from __future__ import annotations

from sylvan.utils.clock import Clock, monotonic

CHECKS_PER_LIMIT = 10


class Watchdog:
    """Judges the age of a process's last heartbeat, once per interval.

    When the whole process group was suspended (SIGSTOP, a sleeping laptop, a frozen container), all
    heartbeats look old on waking although everything is well, and those that wait in the socket
    have not been read. The watchdog recognises this by its own checks: if one comes much later than
    an interval after the last, this process did not run either. The age is then counted from that
    check on, so that a process is judged only by time in which this one ran as well.

    Args:
        limit_s: Age of the last heartbeat above which a process hangs.

    Attributes:
        interval_s: Seconds from one check to the next, to be kept by the caller.
    """

    def __init__(self, limit_s: float, clock: Clock = monotonic) -> None:
        self.interval_s = limit_s / CHECKS_PER_LIMIT
        self._limit_s = limit_s
        self._clock = clock
        self._checked_s = self._counts_from_s = clock()

    def hangs(self, heartbeat_s: float | None) -> bool:
        """Whether a process whose last heartbeat came at `heartbeat_s` hangs; None: it starts."""
        now = self._clock()
        if now - self._checked_s > 2 * self.interval_s:
            self._counts_from_s = now
        self._checked_s = now
        if heartbeat_s is None:
            return False
        return now - max(heartbeat_s, self._counts_from_s) > self._limit_s
