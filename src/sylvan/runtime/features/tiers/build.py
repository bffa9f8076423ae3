"""Builds both halves from the configuration, and opens the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from sylvan.config.env import cache_dir
from sylvan.config.tree import Config, TiersConfig
from sylvan.kernels.api import Communicator
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.residency import Tier, TierPolicy
from sylvan.runtime.core.req import Req
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.facts import LoadedModelInfo
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.executor.rank_bytes import all_gather_bytes
from sylvan.runtime.features.tiers.codec import NumberType
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.host import HostTier
from sylvan.runtime.features.tiers.host_memory import HostSize, lay_out
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.features.tiers.stores import Stores, limits_of
from sylvan.runtime.features.tiers.tier import Layout, StorageTier, write_ahead_pages
from sylvan.runtime.features.tiers.work import StoreSpec
from sylvan.runtime.features.tiers.worker import KVTiersWorker, staged_bytes
from sylvan.runtime.layers.mesh import ONE_RANK
from sylvan.runtime.storage.api import StoreError
from sylvan.runtime.storage.find import check_url, shown
from sylvan.runtime.storage.identity import kv_manifest
from sylvan.runtime.storage.manifest import GroupLayout
from sylvan.utils.machine import inspect_machine

logger = logging.getLogger(__name__)

KNOWN_PER_PAGE = 16
"""Stored pages that the tree may track per device page: it keeps their token IDs and
numbers."""


@dataclass(slots=True, eq=False)
class TiersParts:
    """The parts of KV tiers, in the order in which a server is built.

    First `worker` for the executor, then `open` once the executor exists, then `tiers` and
    `policy` for the cache, then `control` for the scheduler; it sets `made`.
    """

    settings: TiersConfig
    made: KVTiers | None = None
    _ranks: Communicator = ONE_RANK.tp
    _worker: KVTiersWorker | None = None
    _tier: StorageTier | None = None
    _stores: Stores | None = None
    _host: HostTier | None = None

    @property
    def writing(self) -> frozenset[int]:
        """Writes to the store in progress."""
        return self._tier.writing if self._tier is not None else frozenset()

    def prefetch_again(self, req: Req, wait_s: float) -> None:
        if self.made is not None:
            self.made.prefetch_again(req, wait_s)

    def worker(self, context: ModelContext) -> CapabilityWorker:
        """Return the factory of the worker half."""
        self._ranks = context.build.mesh.tp
        self._worker = KVTiersWorker(context.memory, ranks=self._ranks)
        return self._worker

    def open(self, config: Config, model: LoadedModelInfo, model_dir: Path) -> None:
        """Open the configured store for the built model; collective.

        Raises:
            ConfigError: It holds pages of another model, or is unreachable; the message says how to
            proceed.
        """
        assert self._worker is not None
        groups, memory = self._worker.memory()
        if groups[0].kind == "window":
            raise ConfigError(
                "tiers: all layers of this model attend to a window, and such pages are not kept; "
                "leave tiers out"
            )
        layout = Layout(
            groups=tuple(groups),
            page_bytes=tuple(each.page_bytes for each in memory),
            ranks=self._ranks.size,
        )
        settings, counts = self.settings, TierCounts()
        here = config.parallel.ranks_per_node
        if (size := host_size(settings, here)) is not None:
            numbers = cast("NumberType", model.dtype)
            available = inspect_machine().available_bytes // here
            slots = lay_out(size, groups, layout.page_bytes, numbers, available)
            self._worker.host = slots
            self._host = HostTier(
                layout=layout,
                slots=slots.slots,
                max_pending_bytes=staged_bytes(memory),
                counts=counts,
            )
        same = ", sums in parts" if config.parallel.same_bits is True else ""
        manifest = kv_manifest(
            config,
            model_dir,
            dtype=model.dtype,
            runner=model.runner + same,
            page_size=layout.page_size,
            groups=tuple(
                GroupLayout(group.name, group.kind, size, group.window)
                for group, size in zip(layout.groups, layout.page_bytes, strict=True)
            ),
        )
        # the ranks share one store, in which each has its own names
        manifest = msgspec.structs.replace(manifest, shards=(self._ranks.size, 0))
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
            counts=counts,
        )
        self._stores = Stores(self._tier, spec)
        if settings.storage is not None:
            self._open(self._worker, self._stores, spec)

    @property
    def stores(self) -> Stores:
        """The store manager, for commands."""
        assert self._stores is not None
        return self._stores

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, nearest first, for the cache."""
        assert self._tier is not None
        return (self._tier,) if self._host is None else (self._host, self._tier)

    def policy(self, groups: Sequence[KVGroup]) -> TierPolicy:
        """The tier policy of the cache."""
        ahead = write_ahead_pages(self.settings.write_policy, groups[0].num_pages)
        return TierPolicy(write_ahead_pages=ahead, min_load_tokens=groups[0].page_size)

    def control(self, cache: KVCacheManager) -> KVTiers:
        """Build the control half, over a cache with the tiers."""
        settings = self.settings
        self.made = KVTiers(
            cache,
            self.stores,
            settings.write_policy,
            PrefetchPolicy(
                wait=settings.prefetch,
                min_tokens=settings.prefetch_min_tokens,
                timeout_s=settings.prefetch_timeout_s,
                timeout_per_ki_token_s=settings.prefetch_timeout_per_ki_token_s,
            ),
            host=self._host,
        )
        return self.made

    def _open(self, worker: KVTiersWorker, stores: Stores, spec: StoreSpec) -> None:
        check_url(spec.url, limits_of(spec))
        failed = ""
        try:
            worker.open(spec)
        except StoreError as error:
            failed = str(error)
        every = all_gather_bytes(self._ranks, failed.encode())
        error = next((text.decode() for text in every if text), "")
        if error:
            message = f"tiers.storage={shown(spec.url)}: {error}"
            if not failed:  # where others could not
                worker.close_store()
            if self.settings.prefetch != "best_effort":
                raise ConfigError(
                    f"{message}. Fix it, leave tiers.storage out, or start without it: "
                    "tiers.prefetch=best_effort"
                ) from None
            logger.warning("%s; serving without it until it is attached", message)
        else:
            stores.opened(spec)


def host_size(settings: TiersConfig, ranks: int = 1) -> HostSize | None:
    """Return the size of one rank's host tier; None: there is none.

    Args:
        settings: Of all ranks.
        ranks: How many of them share the machine's memory.
    """
    if settings.host_ratio is None and settings.host_bytes is None:
        return None
    num_bytes = None if settings.host_bytes is None else settings.host_bytes // ranks
    return HostSize(settings.host_ratio, num_bytes, settings.host_dtype)


def url_of(storage: str, directory: str | None = None) -> str:
    """Return the URL or directory of a store; `file` stands for `directory`."""
    return (directory or str(cache_dir() / "kv")) if storage == "file" else storage
