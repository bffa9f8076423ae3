"""Exports heartbeat fields as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Table = Mapping[str, tuple[str, str]]
"""Metric name without prefix -> heartbeat field, and help text."""


def field_metrics(
    load: object, prefix: str, labels: Mapping[str, str], *, gauges: Table, counters: Table
) -> Iterator[Metric]:
    """Make one series of each metric."""
    names, values = [*labels], [*labels.values()]
    for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (field, doc) in table.items():
            family = kind(prefix + name, doc, labels=names)
            family.add_metric(values, getattr(load, field))
            yield family
