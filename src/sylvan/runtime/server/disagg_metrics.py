"""Metrics of prefill-decode disaggregation; names are SGLang's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sylvan.protocol.disagg import SIZES_MB, SPEEDS_GB_S, TIMES_MS, DisaggLoad
from sylvan.runtime.server.observe.tables import field_metrics

_GAUGES = {
    "num_prefill_bootstrap_queue_reqs": (
        "prefill_bootstrap_queue_reqs",
        "Prompts that no decode server has asked for yet",
    ),
    "num_prefill_inflight_queue_reqs": (
        "prefill_inflight_queue_reqs",
        "Prompts whose KV is being sent to a decode server",
    ),
    "num_decode_prealloc_queue_reqs": (
        "decode_prealloc_queue_reqs",
        "Requests waiting for memory for their KV",
    ),
    "num_decode_transfer_queue_reqs": (
        "decode_transfer_queue_reqs",
        "Requests whose KV is being received",
    ),
    "num_decode_retracted_queue_reqs": (
        "decode_retracted_queue_reqs",
        "Retracted requests waiting for a prefill server to compute them again",
    ),
}
_COUNTERS = {
    "num_bootstrap_failed_reqs": (
        "bootstrap_failed",
        "Requests whose prefill and decode server did not connect",
    ),
    "num_transfer_failed_reqs": ("transfer_failed", "Requests whose KV did not arrive"),
    "num_prefill_retries": ("prefill_retries", "Times that a request asked a prefill server again"),
}
_HISTOGRAMS = {
    "kv_transfer_speed_gb_s": ("speed_gb_s", SPEEDS_GB_S, "Speed of KV transfers"),
    "kv_transfer_latency_ms": (
        "latency_ms",
        TIMES_MS,
        "Time from arrival until all pages of KV had arrived",
    ),
    "kv_transfer_bootstrap_ms": (
        "bootstrap_ms",
        TIMES_MS,
        "Time from arrival until prefill and decode server were connected",
    ),
    "kv_transfer_alloc_ms": (
        "alloc_ms",
        TIMES_MS,
        "Time from arrival until memory for the KV was reserved",
    ),
    "kv_transfer_total_mb": ("total_mb", SIZES_MB, "Size of KV transfers"),
}


class DisaggMetrics(Collector):
    """Reads a scheduler's last heartbeat; yields nothing without a disaggregation role.

    Args:
        load: Load reports of the scheduler.
        prefix: Prefix of metric names.
        labels: Label names and values.
    """

    def __init__(
        self, load: Callable[[], DisaggLoad | None], prefix: str, labels: dict[str, str]
    ) -> None:
        self._load, self._prefix, self._labels = load, prefix, labels

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        if load is None:
            return
        yield from field_metrics(
            load, self._prefix, self._labels, gauges=_GAUGES, counters=_COUNTERS
        )
        names, values = [*self._labels], [*self._labels.values()]
        for name, (field, bounds, doc) in _HISTOGRAMS.items():
            spread = getattr(load, field)
            counts = spread.counts or (0,) * (len(bounds) + 1)
            below = itertools.accumulate(counts)
            texts = [*(str(bound) for bound in bounds), "+Inf"]
            histogram = HistogramMetricFamily(self._prefix + name, doc, labels=names)
            histogram.add_metric(values, [*zip(texts, below, strict=True)], spread.total)
            yield histogram
