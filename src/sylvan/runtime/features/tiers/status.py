"""The state of the tiers: for operators, and in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sylvan.protocol.tiers import TierLoad, WritePolicy
from sylvan.runtime.features.tiers.breaker import Breaker
from sylvan.runtime.features.tiers.cost import LoadCost
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.host import HostTier
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.features.tiers.tier import StorageTier
from sylvan.runtime.storage.find import shown


@dataclass(frozen=True, slots=True)
class Status:
    """Policies in force, measurements, and number of waiting requests."""

    write_policy: WritePolicy
    prefetch: PrefetchPolicy
    breaker: Breaker
    cost: LoadCost
    host_cost: LoadCost
    num_waiting: int


def describe(
    url: str, status: Status, tier: StorageTier, host: HostTier | None = None
) -> Mapping[str, Any]:
    """Describe the tiers, their settings and counters; JSON-like."""
    cost = status.cost
    return {
        "storage": shown(url) if url else None,
        "attached": tier.is_open,
        "write_policy": status.write_policy,
        "prefetch": asdict(status.prefetch),
        "suspended": status.breaker.is_open,
        "last_error": status.breaker.last_error or None,
        "known_pages": len(tier.known),
        "max_known_pages": tier.max_known,
        "pending_bytes": tier.pending_bytes,
        "waiting_requests": status.num_waiting,
        "measured": {
            "compute_tokens_per_s": round(cost.tokens_per_s, 1),
            "fetch_bytes_per_s": round(cost.bytes_per_s),
            "fetch_latency_s": round(cost.latency_s, 6),
            "host_bytes_per_s": round(status.host_cost.bytes_per_s),
        },
        "host": _host(tier, host) if host is not None else None,
        "counts": asdict(tier.counts),
        "layout": [
            {"name": group.name, "kind": group.kind, "page_bytes": size}
            for group, size in zip(tier.layout.groups, tier.layout.page_bytes, strict=True)
        ],
        "page_size": tier.layout.page_size,
    }


def _host(tier: StorageTier, host: HostTier) -> Mapping[str, int]:
    size = tier.layout.page_size
    return {
        "total_tokens": host.slots[0] * size,
        "used_tokens": host.used_pages * size,
        "pending_bytes": host.pending_bytes,
    }


def load_of(status: Status, tier: StorageTier, host: HostTier | None = None) -> TierLoad:
    """Return the counters for heartbeats."""
    counts = tier.counts
    names = set(TierLoad.__struct_fields__) & set(TierCounts.__slots__)
    return TierLoad(
        **{name: getattr(counts, name) for name in names},
        stored_tokens=counts.stored_pages * tier.layout.page_size,
        wrong_pages=sum(counts.faults.values()),
        known_pages=len(tier.known),
        pending_bytes=tier.pending_bytes,
        fetch_bytes_per_s=status.cost.bytes_per_s,
        host_bytes_per_s=status.host_cost.bytes_per_s,
        stores=int(tier.is_open),
        host_used_tokens=host.used_pages * tier.layout.page_size if host is not None else 0,
        host_total_tokens=host.slots[0] * tier.layout.page_size if host is not None else 0,
    )
