"""Decides from measurements whether loading is faster than recomputing."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # weight of the newest measurement
PROBE_EVERY = 16  # one in this many unprofitable fetches is started, to measure again
MIN_STEP_TOKENS = 64  # smaller steps only measure fixed costs
LATE = 2.0  # multiple of a fetch's expected time
LATE_SHARE = 0.1  # share of the compute time, which a request can lose without noticeable delay
MIN_LATE_S = 0.1  # typical hiccup of a loaded machine, in seconds


@dataclass(slots=True)
class LoadCost:
    """Speeds as moving averages; 0: not measured yet.

    Attributes:
        tokens_per_s: Prefill speed of steps.
        bytes_per_s: Read speed of fetches.
        latency_s: Time of a fetch that finds nothing.
    """

    token_bytes: float
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    _passed: int = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record a prefill step."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.tokens_per_s = _average(self.tokens_per_s, num_tokens / seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Record an ended fetch, including cancelled ones."""
        if num_bytes:
            took = max(seconds - self.latency_s, seconds / 2, 1e-6)
            self.bytes_per_s = _average(self.bytes_per_s, num_bytes / took)
        else:
            self.latency_s = _average(self.latency_s, seconds)

    def is_worth(self, num_tokens: int) -> bool:
        """Whether to fetch these tokens instead of computing them."""
        if not self.tokens_per_s or not self.bytes_per_s:
            return True
        if self.fetch_s(num_tokens) < self.compute_s(num_tokens):
            self._passed = 0
            return True
        self._passed += 1
        return self._passed % PROBE_EVERY == 0

    def late_s(self, num_tokens: int) -> float:
        """Return after which time a fetch is abnormally late; 0: speeds unknown."""
        fetch, compute = self.fetch_s(num_tokens), self.compute_s(num_tokens)
        return max(LATE * fetch, LATE_SHARE * compute, MIN_LATE_S) if fetch and compute else 0.0

    def compute_s(self, num_tokens: int) -> float:
        """Return the time to compute these tokens; 0: unknown."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def fetch_s(self, num_tokens: int) -> float:
        """Return the time to fetch these tokens; 0: unknown."""
        if not self.bytes_per_s:
            return 0.0
        return self.latency_s + num_tokens * self.token_bytes / self.bytes_per_s


def _average(before: float, value: float) -> float:
    return before + WEIGHT * (value - before) if before else value
