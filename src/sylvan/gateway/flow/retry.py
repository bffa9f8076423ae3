"""When a request is tried again, and after which pause."""

from __future__ import annotations

from random import Random

from sylvan.config.route import RetryConfig

RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of workers after which another worker is tried."""
MIN_BUDGET = 10.0
"""Retries that are allowed without having been earned, so that few requests can be retried too."""


class RetryBudget:
    """Retries earned by requests: a storm of failures must not multiply the load.

    (Finagle's retry budgets.) Each request earns `ratio` of a retry, each retry takes one.
    """

    def __init__(self, ratio: float, most: float = 100.0) -> None:
        self._ratio = ratio
        self._most = max(most, MIN_BUDGET)
        self.left = MIN_BUDGET

    def earn(self) -> None:
        """A request came."""
        self.left = min(self._most, self.left + self._ratio)

    def take(self) -> bool:
        """Use one retry; False if none is left."""
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
        """Seconds to wait before the next attempt; None if there is to be none."""
        if self.tries >= self._config.max_tries or not self._budget.take():
            return None
        pause_s = backoff_s(self._config, self.tries, self._rng)
        self.tries += 1
        return pause_s


def backoff_s(config: RetryConfig, tries: int, rng: Random) -> float:
    """The pause after so many attempts: exponential, bounded, with jitter."""
    base_ms = config.initial_backoff_ms * config.multiplier ** min(tries - 1, 1000)
    bounded_ms = min(base_ms, config.max_backoff_ms)
    return bounded_ms * (1 + config.jitter * rng.uniform(-1, 1)) / 1000
