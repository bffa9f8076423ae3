"""Worker half: holds the store, and moves pages concurrently with steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from sylvan.kernels.api import Communicator
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.features.tiers.host_memory import HostLayout
from sylvan.runtime.features.tiers.mover import REPORT_S, Mover
from sylvan.runtime.features.tiers.rank_agreement import TierAgreement, suffix_of
from sylvan.runtime.features.tiers.threads import DaemonThreads, MakeThreads
from sylvan.runtime.features.tiers.work import StoreSpec, TiersWork
from sylvan.runtime.layers.mesh import ONE_RANK

STAGED_SHARE = 4
"""Host memory for either direction, as one in this many device pages."""
_MIN_STAGED = 32 << 20

Memory = Callable[[], tuple[Sequence[KVGroup], Sequence[PageMemory]]]


class KVTiersWorker(CapabilityWorker):
    """Starts planned work before the forward pass; reports what has finished.

    Args:
        memory: Returns the KV groups and their page memory, once they exist.
        max_staged_bytes: Host memory limit for fetched pages; None: derived from the device's
            pages.
        threads: Creates threads that wait for the store.
        report_s: Shortest interval between progress reports of a fetch.
        ranks: All ranks of this server; each keeps the pages of its own heads.

    Attributes:
        host: Slots of the host tier, if any; set it before anything is opened or started.
    """

    name: ClassVar = KVTiers.name

    def __init__(
        self,
        memory: Memory,
        max_staged_bytes: int | None = None,
        threads: MakeThreads = DaemonThreads,
        report_s: float = REPORT_S,
        ranks: Communicator = ONE_RANK.tp,
    ) -> None:
        self.memory, self._max_staged_bytes = memory, max_staged_bytes
        self._suffix = suffix_of(ranks)
        self._agreement = TierAgreement(ranks, self.close_store) if ranks.size > 1 else None
        self._threads, self._report_s = threads, report_s
        self.host: HostLayout | None = None
        self._made: Mover | None = None

    def open(self, spec: StoreSpec) -> None:
        """Use a store from the first step on.

        Raises:
            ConfigError: It holds pages of another model, or cannot be opened this way.
            StoreError: It is unreachable.
        """
        self._mover.open(self._own(spec))

    def close_store(self) -> None:
        """Use no store any more."""
        self._mover.begin(TiersWork(detach=True))

    def prepare(self, work: TiersWork) -> None:
        if work.attach is not None:
            work = msgspec.structs.replace(work, attach=self._own(work.attach))
        self._mover.begin(work)

    def after_forward(self, step: StepContext, work: TiersWork) -> Report:
        return self.idle_step(work)

    def idle_step(self, work: TiersWork) -> Report:
        if self._agreement is None:
            return self._mover.events
        found = self._agreement.agree(self._mover.events())
        return lambda: found

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _own(self, spec: StoreSpec) -> StoreSpec:
        """The same store with names of this rank."""
        return msgspec.structs.replace(spec, suffix=self._suffix)

    @property
    def _mover(self) -> Mover:
        if self._made is None:
            groups, memory = self.memory()
            limit = self._max_staged_bytes
            limit = staged_bytes(memory) if limit is None else limit
            self._made = Mover(memory, groups, limit, self._threads, self.host, self._report_s)
        return self._made


def staged_bytes(memory: Sequence[PageMemory]) -> int:
    """Return the host memory for pages in transit in one direction."""
    return max(
        _MIN_STAGED, sum(each.num_pages * each.page_bytes for each in memory) // STAGED_SHARE
    )
