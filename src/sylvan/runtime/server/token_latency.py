"""The histogram of times between tokens; a request adds thousands at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
"""Bucket bounds in seconds; SGLang's, so that its dashboards fit."""


@dataclass(slots=True)
class _Series:
    """Token counts per bucket and total time, for one set of labels."""

    counts: list[int]
    sum_s: float = 0.0


class TokenLatency(Collector):
    """Counts each token with the mean inter-token time of its request.

    Args:
        name: Name of the metric.
        labels: Label names.
        bounds: Bucket bounds, in seconds.
    """

    def __init__(self, name: str, labels: Sequence[str], bounds: Sequence[float] = BUCKETS) -> None:
        self._name, self._labels, self._bounds = name, tuple(labels), tuple(bounds)
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, values: tuple[str, ...], seconds: float, count: int) -> None:
        """Count tokens that took the same time each; `values` are the label values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = _Series([0] * (len(self._bounds) + 1))
        series.counts[bisect_left(self._bounds, seconds)] += count
        series.sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            self._name, "Time between tokens, as the mean of each request", labels=self._labels
        )
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        for values, series in tuple(self._series.items()):
            buckets = list(zip(bounds, map(float, accumulate(series.counts)), strict=True))
            family.add_metric(values, buckets, series.sum_s)
        yield family
