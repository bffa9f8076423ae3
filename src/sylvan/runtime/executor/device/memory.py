"""Measures the memory that a model needs on a device, and sizes the KV cache to fill the rest."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sylvan.config.fields import size_text
from sylvan.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

SHARE = 0.9
"""Share of the initially free memory to use; the rest is for libraries and fragmentation."""
GRAPH_BYTES = 4 << 20
"""Private memory of a captured graph, without its buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUsage:
    """Device memory in bytes, before the KV cache is allocated.

    `free` of `total` bytes were free before anything was loaded. `graphs` is a reserve until the
    graphs are captured.
    """

    total: int
    free: int
    weights: int
    activations: int
    graphs: int

    @property
    def budget(self) -> int:
        """Total budget of everything, in bytes."""
        return int(self.free * SHARE)

    @property
    def fixed(self) -> int:
        """Bytes of everything except the KV cache."""
        return self.weights + self.activations + self.graphs


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory use in bytes, for the startup log."""

    measured: DeviceUsage
    num_pages: int
    page_bytes: int
    has_graphs: bool = False

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return self.num_pages * self.page_bytes

    def describe(self) -> str:
        """The report in one line."""
        m = self.measured
        return (
            f"weights {size_text(m.weights)} + activations {size_text(m.activations)} + graphs "
            f"{size_text(m.graphs)} + KV cache {size_text(self.kv)}, of {size_text(m.budget)} that "
            f"may be used ({size_text(m.free)} free of {size_text(m.total)})"
        )


def plan_pages(
    measured: DeviceUsage, page_bytes: int, wanted: int | None, least: int, most: int | None = None
) -> MemoryReport:
    """Number of pages that fit, padding page included.

    Args:
        measured: Memory used by everything except the KV cache.
        page_bytes: Bytes of a page in all layers.
        wanted: Requested number of pages; None to fill memory.
        least: Minimum number of pages.
        most: Maximum number of pages when filling memory.

    Raises:
        ConfigError: they do not fit; the message states the shortfall.
    """
    free = max(0, measured.budget - measured.fixed)
    # Pages of models without attention have no bytes; they only count tokens.
    room = free // page_bytes if page_bytes else max(wanted or 0, least, most or 0)
    useful = room if most is None else min(room, most)
    pages = max(least, useful if wanted is None else wanted)
    report = MemoryReport(measured=measured, num_pages=pages, page_bytes=page_bytes)
    if pages > room:
        missing = measured.fixed + report.kv - measured.budget
        raise ConfigError(
            f"too little memory on the device: {report.describe()}; {size_text(missing)} missing. "
            "Free memory, or lower cache.memory (cache.max_tokens), context_len, "
            "scheduler.max_batch_tokens or scheduler.max_running_reqs, or choose a smaller model"
        )
    return report
