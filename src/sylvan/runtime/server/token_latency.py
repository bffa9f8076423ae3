"""The histogram of times between tokens, of which a request adds thousands at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
"""Upper bounds in seconds; those of SGLang, so that dashboards fit."""


class TokenLatency(Collector):
    """Counts each token with the mean time between the tokens of its request.

    Args:
        name: Of the metric.
        labels: Of all its samples.
    """

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self._name = name
        self._labels = labels
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """Count so many tokens that took so long each."""
        self._counts[bisect_left(BUCKETS, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        family = HistogramMetricFamily(
            self._name, "Time between tokens, as the mean of each request", labels=[*self._labels]
        )
        bounds = [*map(str, map(float, BUCKETS)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([*self._labels.values()], buckets, self._sum_s)
        yield family
