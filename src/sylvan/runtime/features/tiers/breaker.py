"""Circuit breaker for a store that keeps failing or does not answer."""

from __future__ import annotations

from sylvan.utils.clock import Clock

FAILURES = 3  # in a row
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0


class Breaker:
    """Opens after consecutive failures; each further one doubles the pause until the next try."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._until_s = 0.0
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        """Whether the store must not be called now."""
        return self._clock() < self._until_s

    def failed(self, error: str) -> None:
        """Count a failed or slow call."""
        self.last_error = error
        self._failures += 1
        if self._failures >= FAILURES:
            pause = FIRST_PAUSE_S * 2 ** (self._failures - FAILURES)
            self._until_s = self._clock() + min(pause, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """Count a successful call."""
        self._failures = 0
        self._until_s = 0.0
        self.last_error = ""

    def reset(self) -> None:
        """Reset, for a new store."""
        self.succeeded()
