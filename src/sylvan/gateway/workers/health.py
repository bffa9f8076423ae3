"""Checks the health of workers, at intervals and when one looks lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sylvan.config.route import HealthConfig
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.worker import Worker

logger = logging.getLogger(__name__)

Probe = Callable[[Worker, float], Awaitable[bool]]
"""Probes a worker with a timeout in seconds."""
Counter = Callable[[Worker, bool], None]

SUSPECT_S = 1.0
"""Seconds within which a worker that looks lost must answer."""
RECHECKS = 30
"""Checks of a lost worker, a second apart; then it is checked at the usual intervals only."""


class HealthChecks:
    """Checks every worker in a task of its own; belongs to one event loop.

    Args:
        registry: The workers.
        config: Intervals and thresholds.
        probe: Probes one worker.
        count: Called with each result.
        on_lost: Called with each worker that became unhealthy.
    """

    def __init__(
        self,
        registry: Registry,
        config: HealthConfig,
        probe: Probe,
        count: Counter,
        on_lost: Callable[[Worker], None],
    ) -> None:
        self._config = config
        self._probe = probe
        self._count = count
        self._on_lost = on_lost
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._suspects: dict[str, asyncio.Task[None]] = {}
        registry.on_add.append(self._begin)
        registry.on_remove.append(self._end)

    def suspect(self, worker: Worker) -> None:
        """Check a worker that looks lost now; one failure makes it unhealthy."""
        if not self._is_checked(worker) or worker.id in self._suspects:
            return
        task = asyncio.get_running_loop().create_task(self._check(worker))
        self._suspects[worker.id] = task
        task.add_done_callback(lambda _: self._suspects.pop(worker.id, None))

    async def close(self) -> None:
        """Stop all checks."""
        tasks = [*self._tasks.values(), *self._suspects.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_checked(self, worker: Worker) -> bool:
        return self._config.enabled and not worker.spec.disable_health_check

    def _begin(self, worker: Worker) -> None:
        if self._is_checked(worker):
            task = asyncio.get_running_loop().create_task(self._keep(worker))
            self._tasks[worker.id] = task

    def _end(self, worker: Worker) -> None:
        for tasks in (self._tasks, self._suspects):
            task = tasks.pop(worker.id, None)
            if task is not None:
                task.cancel()

    async def _keep(self, worker: Worker) -> None:
        spec = worker.spec
        interval_s = spec.health_check_interval_secs or self._config.interval_s
        timeout_s = spec.health_check_timeout_secs or self._config.timeout_s
        while True:
            await asyncio.sleep(interval_s)
            ok = await self._probe(worker, timeout_s)
            self._count(worker, ok)
            self._see(worker, ok, self._config)

    async def _check(self, worker: Worker) -> None:
        ok = await self._probe(worker, SUSPECT_S)
        self._count(worker, ok)
        if not ok and worker.health.healthy:
            worker.health.lost(worker.clock())
            worker.changed()
            self._lost(worker)
            await self._expect(worker)

    async def _expect(self, worker: Worker) -> None:
        """Check a lost worker often for a while: most restart within seconds, or were only busy."""
        for _ in range(RECHECKS):
            await asyncio.sleep(SUSPECT_S)
            if worker.health.healthy:
                return
            ok = await self._probe(worker, SUSPECT_S)
            self._count(worker, ok)
            self._see(worker, ok, self._config)

    def _see(self, worker: Worker, ok: bool, config: HealthConfig) -> None:
        if not worker.record_health(ok, config):
            return
        if worker.health.healthy:
            logger.info("worker is healthy url=%s", worker.url)
        else:
            self._lost(worker)

    def _lost(self, worker: Worker) -> None:
        logger.warning("worker is unhealthy url=%s", worker.url)
        self._on_lost(worker)
