"""Metrics of KV tiers; names are SGLang's where it has the metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sylvan.protocol.tiers import TierLoad
from sylvan.runtime.server.observe.tables import field_metrics

_COUNTERS = {
    "storage_prefetch_hit_tokens": ("found_tokens", "Tokens of prompts that the store had"),
    "prefetched_tokens": ("fetched_tokens", "Tokens read from the store"),
    "prefetch_bytes": ("fetched_bytes", "Bytes read from the store"),
    "prefetch_seconds": ("fetch_seconds", "Time that reading took"),
    "storage_prefetch_unfulfilled_tokens": (
        "unfulfilled_tokens",
        "Tokens that the store had, and that were not there in time",
    ),
    "storage_prefetch_skipped": ("skipped_fetches", "Not begun: computing was expected faster"),
    "load_back_tokens": ("loaded_tokens", "Tokens loaded onto the device"),
    "load_back_bytes": ("loaded_bytes", "Bytes loaded onto the device"),
    "load_back_seconds": ("load_seconds", "Time that loading took"),
    "load_back_failures": ("failed_loads", "Loads that failed; their requests computed"),
    "hicache_saved_seconds": ("saved_seconds", "Time saved by loading instead of computing"),
    "backuped_tokens": ("stored_tokens", "Tokens written to the store"),
    "hicache_backup_bytes": ("stored_bytes", "Bytes written to the store"),
    "hicache_backup_seconds": ("store_seconds", "Time that writing took"),
    "hicache_dropped_tokens": ("refused_tokens", "Tokens not written: too much was on its way"),
    "hicache_lost_pages": ("lost_pages", "Pages that could not be written"),
    "hicache_wrong_pages": ("wrong_pages", "Torn, foreign or stale pages, which were not used"),
    "hicache_storage_errors": ("errors", "Calls of the store that failed"),
    "hicache_host_saved_bytes": ("host_saved_bytes", "Bytes copied to the host tier"),
    "hicache_host_save_seconds": ("host_save_seconds", "Time that copying there took"),
    "hicache_host_refused_tokens": (
        "host_refused_tokens",
        "Tokens not copied to the host tier: too much was on its way",
    ),
    "hicache_host_loaded_tokens": ("host_loaded_tokens", "Tokens loaded from the host tier"),
    "hicache_host_loaded_bytes": ("host_loaded_bytes", "Bytes loaded from the host tier"),
    "hicache_host_load_seconds": ("host_load_seconds", "Time that reading it took"),
}
_GAUGES = {
    "hicache_known_pages": ("known_pages", "Pages that the prefix tree knows to be in the store"),
    "hicache_host_used_tokens": ("host_used_tokens", "Tokens in the host tier"),
    "hicache_host_total_tokens": ("host_total_tokens", "Tokens that fit into the host tier"),
    "hicache_fetch_bytes_per_second": ("fetch_bytes_per_s", "Speed at which stores are read"),
    "hicache_host_bytes_per_second": ("host_bytes_per_s", "Speed at which host tiers are read"),
    "hicache_pending_bytes": ("pending_bytes", "Bytes on their way to the store"),
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
