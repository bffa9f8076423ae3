"""Keeps the registry in step with a discovery source."""

from __future__ import annotations

import asyncio
import logging

from sylvan.gateway.discovery.api import DiscoveryError, WorkerSource
from sylvan.gateway.errors import QueueFullError
from sylvan.gateway.observe.metrics import DiscoveryMetrics
from sylvan.gateway.workers.jobs import Jobs
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

logger = logging.getLogger(__name__)


class Reconciler:
    """Adds workers that a source lists, and removes those that it no longer lists.

    Leaves workers alone that were added in other ways. A worker whose settings changed is
    removed and added again. A worker that an operator removed returns with the next change only.

    Args:
        source: Lists the workers.
        registry: All workers.
        jobs: Adds and removes workers.
        metrics: Prometheus metrics.
        clock: For durations.
    """

    def __init__(
        self,
        source: WorkerSource,
        registry: Registry,
        jobs: Jobs,
        metrics: DiscoveryMetrics,
        clock: Clock,
    ) -> None:
        self._source = source
        self._registry = registry
        self._jobs = jobs
        self._metrics = metrics
        self._clock = clock
        self._added: dict[str, tuple[str, WorkerSpec]] = {}  # worker ID and spec, by address
        self._wanted: dict[str, WorkerSpec] = {}
        self._complaint = ""

    async def run(self, interval_s: float) -> None:
        """Poll the source until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(interval_s)

    async def poll(self) -> None:
        """Poll once, and start the resulting additions and removals."""
        name, began = self._source.name, self._clock()
        try:
            specs = await self._source.list_workers()
        except DiscoveryError as error:
            if str(error) != self._complaint:
                logger.warning("discovery by %s: %s; workers stay as they are", name, error)
            self._complaint = str(error)
            return
        finally:
            self._metrics.sync.labels(name).observe(self._clock() - began)
        self._complaint = ""
        if specs is not None:
            self._wanted = {spec.url: spec for spec in specs}
            self._metrics.workers.labels(name).set(len(specs))
        self._remove_old()
        self._add_new(changed=specs is not None)

    def _remove_old(self) -> None:
        for url, (worker_id, spec) in tuple(self._added.items()):
            if self._wanted.get(url) == spec:
                continue
            del self._added[url]
            reason = "changed" if url in self._wanted else "gone"
            self._metrics.deregistrations.labels(self._source.name, reason).inc()
            members = [w for w in self._registry.workers if w.spec.url == url]
            for worker in members:
                self._jobs.remove(worker)
            if not members:
                self._jobs.cancel(worker_id)

    def _add_new(self, *, changed: bool) -> None:
        """Add new workers, and retry those that could not be added before."""
        pending = [spec for url, spec in self._wanted.items() if not self._is_added(url)]
        name = self._source.name
        for spec in pending:
            try:
                worker_id = self._jobs.add(spec)
            except RequestError as error:
                if not changed:
                    continue
                logger.info("discovery by %s: %s", name, error)
                result = "duplicate"
            except QueueFullError as error:
                logger.warning("discovery by %s: %s", name, error)
                result = "full"
            else:
                self._added[spec.url] = (worker_id, spec)
                result = "added"
            self._metrics.registrations.labels(name, result).inc()

    def _is_added(self, url: str) -> bool:
        if url not in self._added:
            return False
        job = self._jobs.get(self._added[url][0])
        return job is None or (job.kind, job.state) != ("add", "failed")
