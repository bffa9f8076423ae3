"""When a failed request is retried, and after which pause."""

from __future__ import annotations

from random import Random

from sylvan.config.route import RetryConfig

RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a worker after which another worker is tried."""
MIN_BUDGET = 10.0
"""Retries that are allowed before any were earned, so that low traffic can be retried too."""


class RetryBudget:
    """Limits retries to a share of the requests, so that mass failures do not multiply the load.

    As in Finagle's retry budgets, each request earns `ratio` of a retry, and each retry costs one.
    """

    def __init__(self, ratio: float, most: float = 100.0) -> None:
        self._ratio = ratio
        self._most = max(most, MIN_BUDGET)
        self.left = MIN_BUDGET

    def earn(self) -> None:
        """Count a new request."""
        self.left = min(self._most, self.left + self._ratio)

    def take(self) -> bool:
        """Spend one retry; False if none is left."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Retries:
    """The attempts at one request."""

    def __init__(self, config: RetryConfig, budget: RetryBudget, rng: Random) -> None:
        self._config = config
        self._budget = budget
        self._rng = rng
        self.tries = 1
        budget.earn()

    def next_pause_s(self) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is none."""
        if self.tries >= self._config.max_tries or not self._budget.take():
            return None
        pause_s = backoff_s(self._config, self.tries, self._rng)
        self.tries += 1
        return pause_s


def backoff_s(config: RetryConfig, tries: int, rng: Random) -> float:
    """Return the pause after some attempts: exponential, bounded, with jitter."""
    base_ms = config.initial_backoff_ms * config.multiplier ** min(tries - 1, 1000)
    bounded_ms = min(base_ms, config.max_backoff_ms)
    return bounded_ms * (1 + config.jitter * rng.uniform(-1, 1)) / 1000
