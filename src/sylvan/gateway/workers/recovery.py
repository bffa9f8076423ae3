"""Waits for workers that were lost a moment ago: most are back within seconds."""

from __future__ import annotations

import asyncio

from sylvan.config.route import FailoverConfig
from sylvan.gateway.errors import NoWorkerError
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Connection, Kind
from sylvan.utils.clock import Clock

STEP_S = 0.1
"""Seconds between checks of the registry."""


class Recovery:
    """Waits for an available worker, for requests and streams that have none.

    Args:
        registry: The workers.
        config: How long to wait.
        clock: The registry's clock.
    """

    def __init__(self, registry: Registry, config: FailoverConfig, clock: Clock) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock

    async def for_request(self, model: str | None, kind: Kind, connection: Connection) -> bool:
        """Wait for a worker for a new request; return whether there is one.

        The time counts from the moment at which the last worker was lost. If none was, or if this
        is longer ago, the request is refused at once.
        """
        while not self._has(model, kind, connection):
            lost_s = self._registry.lost_s(model, kind, connection)
            if lost_s is None or self._clock() >= lost_s + self._config.wait_s:
                return False
            await asyncio.sleep(STEP_S)
        return True

    async def for_stream(self, model: str | None, kind: Kind, connection: Connection) -> bool:
        """Wait for a worker that can continue a stream; return whether one appeared."""
        deadline = self._clock() + self._config.stall_s
        while self._clock() < deadline:
            await asyncio.sleep(STEP_S)
            if self._has(model, kind, connection, continuing=True):
                return True
        return False

    def _has(
        self,
        model: str | None,
        kind: Kind,
        connection: Connection,
        *,
        continuing: bool = False,
    ) -> bool:
        try:
            self._registry.candidates(model, kind, connection, continuing=continuing)
        except NoWorkerError:
            return False
        return True
