"""Decides when a child process is restarted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sylvan.utils.clock import Clock, monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Allows at most `max_restarts` restarts within `window_s` seconds.

    The first restart is immediate, the second comes after four times `base_delay_s`, and each later
    one after twice the previous delay.
    """

    max_restarts: int = 5
    window_s: float = 120.0
    base_delay_s: float = 0.25


@dataclass(slots=True)
class Backoff:
    """Applies a policy to one child; restarts older than the window do not count."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    clock: Clock = monotonic
    _times: deque[float] = field(default_factory=deque[float])

    def next_delay_s(self) -> float | None:
        """Return the delay before the next restart; None: do not restart."""
        now = self.clock()
        while self._times and now - self._times[0] > self.policy.window_s:
            self._times.popleft()
        if len(self._times) >= self.policy.max_restarts:
            return None
        self._times.append(now)
        count = len(self._times)
        return 0.0 if count == 1 else self.policy.base_delay_s * 2.0**count
