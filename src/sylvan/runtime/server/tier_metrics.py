"""Metrics of KV tiers; names are SGLang's where it has the metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sylvan.protocol.tiers import TierLoad
from sylvan.runtime.server.observe.tables import field_metrics

_COUNTERS = {
    "storage_prefetch_hit_tokens": ("found_tokens", "Prompt tokens that the KV store had"),
    "prefetched_tokens": ("fetched_tokens", "Tokens read from the KV store"),
    "prefetch_bytes": ("fetched_bytes", "Bytes read from the KV store"),
    "prefetch_seconds": ("fetch_seconds", "Time spent reading from the KV store"),
    "storage_prefetch_unfulfilled_tokens": (
        "unfulfilled_tokens",
        "Tokens that the KV store had but did not deliver in time",
    ),
    "storage_prefetch_skipped": (
        "skipped_fetches",
        "Reads of the KV store not started, because computing was expected to be faster",
    ),
    "load_back_tokens": ("loaded_tokens", "Tokens of KV loaded from a tier onto the device"),
    "load_back_bytes": ("loaded_bytes", "Bytes of KV loaded from a tier onto the device"),
    "load_back_seconds": ("load_seconds", "Time spent loading KV from a tier onto the device"),
    "load_back_failures": (
        "failed_loads",
        "Failed loads from a tier; their requests compute the KV again",
    ),
    "hicache_saved_seconds": (
        "saved_seconds",
        "Estimated time saved by loading KV instead of computing it",
    ),
    "backuped_tokens": ("stored_tokens", "Tokens written to the KV store"),
    "hicache_backup_bytes": ("stored_bytes", "Bytes written to the KV store"),
    "hicache_backup_seconds": ("store_seconds", "Time spent writing to the KV store"),
    "hicache_dropped_tokens": (
        "refused_tokens",
        "Tokens not written to the KV store, because too many writes were pending",
    ),
    "hicache_lost_pages": ("lost_pages", "Pages that could not be written to the KV store"),
    "hicache_wrong_pages": (
        "wrong_pages",
        "Torn, foreign or stale pages of the KV store; they were not used",
    ),
    "hicache_storage_errors": ("errors", "Failed calls of the KV store"),
    "hicache_host_saved_bytes": ("host_saved_bytes", "Bytes copied to the host tier"),
    "hicache_host_save_seconds": ("host_save_seconds", "Time spent copying to the host tier"),
    "hicache_host_refused_tokens": (
        "host_refused_tokens",
        "Tokens not copied to the host tier, because too many copies were pending",
    ),
    "hicache_host_loaded_tokens": ("host_loaded_tokens", "Tokens loaded from the host tier"),
    "hicache_host_loaded_bytes": ("host_loaded_bytes", "Bytes loaded from the host tier"),
    "hicache_host_load_seconds": ("host_load_seconds", "Time spent reading from the host tier"),
}
_GAUGES = {
    "hicache_known_pages": (
        "known_pages",
        "Pages that the prefix tree knows to be in the KV store",
    ),
    "hicache_host_used_tokens": ("host_used_tokens", "Tokens in the host tier"),
    "hicache_host_total_tokens": ("host_total_tokens", "Tokens that the host tier can hold"),
    "hicache_fetch_bytes_per_second": (
        "fetch_bytes_per_s",
        "Measured speed of reading from the KV store",
    ),
    "hicache_host_bytes_per_second": (
        "host_bytes_per_s",
        "Measured speed of reading from the host tier",
    ),
    "hicache_pending_bytes": ("pending_bytes", "Bytes waiting to be written to the KV store"),
}


class TierMetrics(Collector):
    """Counters of schedulers at their last heartbeats; none without tiers.

    Args:
        load: Load reports of all schedulers.
        prefix: Prefix of metric names.
        labels: Label names and values.
    """

    def __init__(
        self, load: Callable[[], TierLoad | None], prefix: str, labels: dict[str, str]
    ) -> None:
        self._load, self._prefix, self._labels = load, prefix, labels

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        if load is None:
            return
        yield from field_metrics(
            load, self._prefix, self._labels, gauges=_GAUGES, counters=_COUNTERS
        )
