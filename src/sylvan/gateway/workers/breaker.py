"""Circuit breaker: stops sending to a worker that keeps failing, for a while."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from sylvan.config.route import BreakerConfig
from sylvan.utils.clock import Clock

Transition = Callable[["BreakerState", "BreakerState"], None]


class BreakerState(Enum):
    """CLOSED passes all requests, OPEN none, HALF_OPEN a few trial requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after consecutive failures; later passes trial requests, and closes if they succeed.

    Attributes:
        failures: Consecutive failures.
        successes: Consecutive successes.
        on_change: Called with the old and new state on each change.
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
        """The current state; an open circuit becomes half-open after its timeout."""
        if (
            self._state is BreakerState.OPEN
            and self._clock() - self._opened_s >= self._config.open_s
        ):
            self._trials = 0
            self._become(BreakerState.HALF_OPEN)
        return self._state

    @property
    def closed(self) -> bool:
        """Whether it is closed; it stays closed until a request fails."""
        return self._state is BreakerState.CLOSED

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._trials < self._config.successes
        return state is BreakerState.CLOSED

    def sent(self) -> None:
        """Count a request that is being sent; `succeeded`, `failed` or `abandoned` follows."""
        if self._state is BreakerState.HALF_OPEN:
            self._trials += 1

    def abandoned(self) -> None:
        """Count a request without a verdict on the worker: the client left, or it was rejected."""
        self._trials = max(0, self._trials - 1)

    def succeeded(self) -> None:
        """Count a success."""
        self._trials = max(0, self._trials - 1)
        self.failures = 0
        self.successes += 1
        if self.state is BreakerState.HALF_OPEN and self.successes >= self._config.successes:
            self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        """Count a failure: no answer, or a server error."""
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
        """Close the circuit: the worker was lost, and is back."""
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
