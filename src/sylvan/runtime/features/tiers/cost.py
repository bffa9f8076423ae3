"""Whether loading is faster than computing, by what was measured."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # of the newest measurement
PROBE_EVERY = 16  # of fetches that seem not worth it, one is begun, to measure anew
MIN_STEP_TOKENS = 64  # smaller steps measure their fixed costs
LATE = 2.0  # times the time that a fetch was expected to take
LATE_SHARE = 0.1  # of the time of computing, which a request can lose without being much later
LEAST_LATE_S = 0.1  # what machines under load take now and then


@dataclass(slots=True)
class LoadCost:
    """Speeds as moving averages; 0: not measured yet.

    Attributes:
        tokens_per_s: That steps compute of prompts.
        bytes_per_s: That fetches read.
        latency_s: Of a fetch that finds nothing to read.
    """

    token_bytes: float
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    _passed: int = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed prompts."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.tokens_per_s = _average(self.tokens_per_s, num_tokens / seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A fetch ended; also one that was given up."""
        if num_bytes:
            took = max(seconds - self.latency_s, seconds / 2, 1e-6)
            self.bytes_per_s = _average(self.bytes_per_s, num_bytes / took)
        else:
            self.latency_s = _average(self.latency_s, seconds)

    def is_worth(self, num_tokens: int) -> bool:
        """Whether to fetch so many tokens rather than to compute them."""
        if not self.tokens_per_s or not self.bytes_per_s:
            return True
        if self.fetch_s(num_tokens) < self.compute_s(num_tokens):
            self._passed = 0
            return True
        self._passed += 1
        return self._passed % PROBE_EVERY == 0

    def late_s(self, num_tokens: int) -> float:
        """After which a fetch takes longer than can be explained; 0: speeds are not known."""
        fetch, compute = self.fetch_s(num_tokens), self.compute_s(num_tokens)
        return max(LATE * fetch, LATE_SHARE * compute, LEAST_LATE_S) if fetch and compute else 0.0

    def compute_s(self, num_tokens: int) -> float:
        """How long computing so many tokens takes; 0: not known."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def fetch_s(self, num_tokens: int) -> float:
        """How long fetching so many tokens takes; 0: not known."""
        if not self.bytes_per_s:
            return 0.0
        return self.latency_s + num_tokens * self.token_bytes / self.bytes_per_s


def _average(before: float, value: float) -> float:
    return before + WEIGHT * (value - before) if before else value
