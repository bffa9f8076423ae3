"""Polls workers for load that other clients cause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sylvan.gateway.workers.probe import Reported
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.worker import Worker

Ask = Callable[[Worker, float], Awaitable[Reported | None]]


class LoadMonitor:
    """Updates `Worker.foreign_load`: the reported load minus this gateway's own."""

    def __init__(self, registry: Registry, ask: Ask, interval_s: float) -> None:
        self._registry = registry
        self._ask = ask
        self._interval_s = interval_s

    async def run(self) -> None:
        """Poll all workers until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await asyncio.gather(*(self._poll(worker) for worker in self._registry.workers))

    async def _poll(self, worker: Worker) -> None:
        if not worker.is_healthy:
            return
        before = worker.num_running + worker.peer_running
        reported = await self._ask(worker, self._interval_s)
        if reported is None:
            worker.record_foreign_load(0)
            return
        ours = max(
            before, worker.num_running + worker.peer_running
        )  # requests started and ended meanwhile
        worker.record_foreign_load(max(0, reported.num_reqs - ours))
        worker.found.capacity_tokens = reported.capacity_tokens or worker.found.capacity_tokens
