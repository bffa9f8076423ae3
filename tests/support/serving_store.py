"""A directory store below the device of a `Serving`: both halves of KV tiers."""

from __future__ import annotations

from pathlib import Path

from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.residency import Tier, TierPolicy
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.features.tiers.stores import Stores
from sylvan.runtime.features.tiers.tier import Layout, StorageTier
from sylvan.runtime.features.tiers.work import StoreSpec
from sylvan.runtime.features.tiers.worker import KVTiersWorker
from tests.support.stores import manifest

STAGED = 64 << 20


class ServingStore:
    """Writes everything through, and waits until all available KV is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.half: KVTiersWorker
        self.tier: StorageTier

    def worker(self, context: ModelContext) -> CapabilityWorker:
        self.half = KVTiersWorker(context.memory, STAGED)
        return self.half

    def below(self, caps: ExecutorCaps) -> tuple[tuple[Tier, ...], TierPolicy]:
        groups, memory = self.half.memory()
        layout = Layout(groups=tuple(groups), page_bytes=tuple(m.page_bytes for m in memory))
        self.tier = StorageTier(
            layout=layout, max_known=100_000, max_pending_bytes=STAGED, counts=TierCounts()
        )
        pages = caps.kv_groups[0].num_pages
        return (self.tier,), TierPolicy(write_ahead_pages=pages, min_load_tokens=1)

    def control(self, cache: KVCacheManager) -> KVTiers:
        size = self.tier.layout.page_size
        spec = StoreSpec(url=str(self.folder), manifest=manifest(page_size=size).encode())
        stores = Stores(self.tier, spec)
        self.half.open(spec)
        stores.opened(spec)
        policy = PrefetchPolicy(wait="wait_complete", min_tokens=1)
        return KVTiers(cache, stores, "write_through", policy)
