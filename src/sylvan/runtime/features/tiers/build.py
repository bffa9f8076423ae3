"""From the configuration to both halves, and the store open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.config.env import cache_dir
from sylvan.config.tree import Config, TiersConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.residency import TierPolicy
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.facts import ModelFacts
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.data import StoreSpec
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.features.tiers.stores import Stores, limits_of
from sylvan.runtime.features.tiers.tier import Layout, StorageTier, write_ahead_pages
from sylvan.runtime.features.tiers.worker import KVTiersWorker, staged_bytes
from sylvan.runtime.storage.api import StoreError
from sylvan.runtime.storage.find import check_url, shown
from sylvan.runtime.storage.identity import kv_manifest
from sylvan.runtime.storage.manifest import GroupLayout

logger = logging.getLogger(__name__)

KNOWN_PER_PAGE = 16
"""Pages that the tree may know to be in the store, for each page of the device: token ids and
numbers of these are kept."""


@dataclass(slots=True, eq=False)
class TiersParts:
    """What is made of the settings, in the order in which a server is put together.

    First `worker` for the executor, then `open` once the executor is there, then `tier` and
    `policy` for the cache, then `control` for the scheduler.
    """

    settings: TiersConfig
    _worker: KVTiersWorker | None = None
    _tier: StorageTier | None = None
    _stores: Stores | None = None

    def worker(self, site: ModelSite) -> CapabilityWorker:
        """The worker half."""
        self._worker = KVTiersWorker(site.memory)
        return self._worker

    def open(self, config: Config, model: ModelFacts, model_dir: Path) -> None:
        """Open the store, if there is one, for the model that was built.

        Raises:
            ConfigError: it holds pages of another model, or cannot be reached; says the way out.
        """
        assert self._worker is not None
        groups, memory = self._worker.memory()
        if groups[0].kind == "window":
            raise ConfigError(
                "tiers: all layers of this model attend to a window, and such pages are not kept; "
                "leave tiers out"
            )
        layout = Layout(groups=tuple(groups), page_bytes=tuple(each.page_bytes for each in memory))
        settings = self.settings
        manifest = kv_manifest(
            config,
            model_dir,
            dtype=model.dtype,
            runner=model.runner,
            page_size=layout.page_size,
            groups=tuple(
                GroupLayout(group.name, group.kind, size, group.window)
                for group, size in zip(layout.groups, layout.page_bytes, strict=True)
            ),
        )
        spec = StoreSpec(
            url=url_of(settings.storage or "", settings.directory),
            manifest=manifest.encode(),
            max_bytes=settings.max_bytes,
            space_bytes=settings.namespace_bytes,
            ttl_s=settings.ttl_s,
            key_file=settings.key_file,
            default_url=url_of("file", settings.directory),
        )
        self._tier = StorageTier(
            layout=layout,
            max_known=KNOWN_PER_PAGE * sum(group.num_pages for group in groups),
            max_pending_bytes=staged_bytes(memory),
            counts=TierCounts(),
        )
        self._stores = Stores(self._tier, spec)
        if settings.storage is not None:
            self._open(self._worker, self._stores, spec)

    @property
    def stores(self) -> Stores:
        """For commands from outside."""
        assert self._stores is not None
        return self._stores

    @property
    def tier(self) -> StorageTier:
        """For the cache."""
        assert self._tier is not None
        return self._tier

    def policy(self, groups: Sequence[KVGroup]) -> TierPolicy:
        """How the cache is to use it."""
        ahead = write_ahead_pages(self.settings.write_policy, groups[0].num_pages)
        return TierPolicy(write_ahead_pages=ahead, min_load_tokens=groups[0].page_size)

    def control(self, cache: KVCacheManager) -> KVTiers:
        """The control half, over a cache that has the tier."""
        settings = self.settings
        return KVTiers(
            cache,
            self.tier,
            self.stores,
            settings.write_policy,
            PrefetchPolicy(
                wait=settings.prefetch,
                min_tokens=settings.prefetch_min_tokens,
                timeout_s=settings.prefetch_timeout_s,
                timeout_per_ki_token_s=settings.prefetch_timeout_per_ki_token_s,
            ),
        )

    def _open(self, worker: KVTiersWorker, stores: Stores, spec: StoreSpec) -> None:
        check_url(spec.url, limits_of(spec))
        try:
            worker.open(spec)
        except StoreError as error:
            message = f"tiers.storage={shown(spec.url)}: {error}"
            if self.settings.prefetch != "best_effort":
                raise ConfigError(
                    f"{message}. Mend it, leave tiers.storage out, or start without it: "
                    "tiers.prefetch=best_effort"
                ) from None
            logger.warning("%s; serving without it until it is attached", message)
        else:
            stores.opened(spec)


def url_of(storage: str, directory: str | None = None) -> str:
    """The URL or directory of a store; `file` stands for `directory`."""
    return (directory or str(cache_dir() / "kv")) if storage == "file" else storage
