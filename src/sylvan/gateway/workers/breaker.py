"""Circuit breaker: a worker that keeps failing is left alone for a while."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from sylvan.config.route import BreakerConfig
from sylvan.utils.clock import Clock

Transition = Callable[["BreakerState", "BreakerState"], None]


class BreakerState(Enum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN a few requests that decide."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after failures in a row; later lets a few requests try, and closes if they succeed.

    Attributes:
        failures: Failures in a row.
        successes: Successes in a row.
        on_change: Called with each change of state, with the old and the new one.
    """

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._opened_s = 0.0
        self._failed_s = 0.0
        self._trials = 0
        self.failures = 0
        self.successes = 0
        self.on_change: list[Transition] = []

    @property
    def state(self) -> BreakerState:
        """The present state; an open circuit becomes half-open when its time is over."""
        if (
            self._state is BreakerState.OPEN
            and self._clock() - self._opened_s >= self._config.open_s
        ):
            self._trials = 0
            self._become(BreakerState.HALF_OPEN)
        return self._state

    @property
    def closed(self) -> bool:
        """Whether it is closed, and stays so until a request fails."""
        return self._state is BreakerState.CLOSED

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._trials < self._config.successes
        return state is BreakerState.CLOSED

    def sent(self) -> None:
        """A request is being sent; `succeeded`, `failed` or `abandoned` follows."""
        if self._state is BreakerState.HALF_OPEN:
            self._trials += 1

    def abandoned(self) -> None:
        """A request ended without a verdict on the worker: its client left, or it was refused."""
        self._trials = max(0, self._trials - 1)

    def succeeded(self) -> None:
        """The worker answered."""
        self._trials = max(0, self._trials - 1)
        self.failures = 0
        self.successes += 1
        if self.state is BreakerState.HALF_OPEN and self.successes >= self._config.successes:
            self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        """The worker did not answer, or said that it is broken."""
        now = self._clock()
        self._trials = max(0, self._trials - 1)
        if now - self._failed_s > self._config.window_s:
            self.failures = 0
        self._failed_s = now
        self.failures += 1
        self.successes = 0
        if not self._config.enabled:
            return
        state = self.state
        if state is BreakerState.HALF_OPEN or (
            state is BreakerState.CLOSED and self.failures >= self._config.failures
        ):
            self._opened_s = now
            self._become(BreakerState.OPEN)

    def reset(self) -> None:
        """Forget what failed: the worker was lost, and is back."""
        self._trials = 0
        self.failures = self.successes = 0
        if self._state is not BreakerState.CLOSED:
            self._become(BreakerState.CLOSED)

    def _become(self, state: BreakerState) -> None:
        old, self._state = self._state, state
        if state is not BreakerState.OPEN:
            self.failures = self.successes = 0
        for listener in self.on_change:
            listener(old, state)
