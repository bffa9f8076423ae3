"""Counters and histograms of KV transfers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from sylvan.protocol.disagg import SIZES_MB, SPEEDS_GB_S, TIMES_MS, Spread


@dataclass(slots=True)
class TransferCounts:
    """Counts since the start: requests with a room, and the outcomes of their transfers.

    `unmet`: failed requests whose two servers did not connect. `again`: requests that asked the
    prefill server once more after they were retracted.
    """

    started: int = 0
    done: int = 0
    failed: int = 0
    refused: int = 0
    unmet: int = 0
    again: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Histogram:
    """A histogram with fixed bucket bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def spread(self) -> Spread:
        """Return all observations."""
        return Spread(tuple(self._counts), self._total)


@dataclass(slots=True)
class TransferTimes:
    """Time to connect, to get memory, and to transfer; and transferred bytes."""

    speed_gb_s: Histogram = field(default_factory=lambda: Histogram(SPEEDS_GB_S))
    latency_ms: Histogram = field(default_factory=lambda: Histogram(TIMES_MS))
    bootstrap_ms: Histogram = field(default_factory=lambda: Histogram(TIMES_MS))
    alloc_ms: Histogram = field(default_factory=lambda: Histogram(TIMES_MS))
    total_mb: Histogram = field(default_factory=lambda: Histogram(SIZES_MB))
    last_speed_gb_s: float = 0.0
    last_latency_ms: float = 0.0

    def moved(self, num_bytes: int, seconds: float) -> None:
        """Record a successful transfer."""
        self.last_latency_ms = 1000 * seconds
        self.latency_ms.observe(self.last_latency_ms)
        self.total_mb.observe(num_bytes / 1e6)
        if num_bytes and seconds > 0:
            self.last_speed_gb_s = num_bytes / seconds / 1e9
            self.speed_gb_s.observe(self.last_speed_gb_s)


@dataclass(slots=True)
class TransferStats:
    """All statistics."""

    counts: TransferCounts = field(default_factory=TransferCounts)
    times: TransferTimes = field(default_factory=TransferTimes)
