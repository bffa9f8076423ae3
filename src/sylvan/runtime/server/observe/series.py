"""Counters and histograms for what happens at every request.

A request changes two dozen of them. The classes of `prometheus_client` take a lock for each change
and search buckets from the lowest; these belong to one thread, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CounterSeries:
    """The count of one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to the count; gauges may go down."""
        self.value += amount


class CounterFamily(Collector):
    """A counter with labels.

    Args:
        name: Name of the metric, without `_total`.
        doc: Help text.
        labels: Label names.
        registry: Prometheus registry.
    """

    family: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily

    def __init__(
        self, name: str, doc: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._doc, self._labels = name, doc, tuple(labels)
        self._series: dict[tuple[str, ...], CounterSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> CounterSeries:
        """Return the series with these label values, which is exported from now on."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = CounterSeries()
        return found

    def collect(self) -> Iterator[Metric]:
        family = self.family(self._name, self._doc, labels=self._labels)
        for values, series in tuple(self._series.items()):
            family.add_metric(values, series.value)
        yield family


class GaugeFamily(CounterFamily):
    """A gauge with labels."""

    family = GaugeMetricFamily


class HistogramSeries:
    """The observations of one set of label values.

    Args:
        bounds: Upper bounds of the buckets, which include them; the last bucket has none.

    Attributes:
        counts: Observations in each bucket.
        total: Sum of all observations.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `times` observations of a value."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class HistogramFamily(Collector):
    """A histogram with labels.

    Args:
        name: Name of the metric.
        doc: Help text.
        bounds: Upper bounds of the buckets, increasing; the last bucket has none.
        labels: Label names.
        registry: Prometheus registry.
    """

    def __init__(
        self,
        name: str,
        doc: str,
        bounds: Sequence[float],
        labels: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._doc, self._labels = name, doc, tuple(labels)
        self._bounds = tuple(map(float, bounds))
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramSeries:
        """Return the series with these label values, which is exported from now on."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = HistogramSeries(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._doc, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in tuple(self._series.items()):
            buckets = list(zip(names, map(float, accumulate(series.counts)), strict=True))
            family.add_metric(values, buckets, series.total)
        yield family
