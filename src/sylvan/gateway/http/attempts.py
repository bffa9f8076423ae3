"""The attempts at one request: whom to avoid after a failure, and when to try again."""

from __future__ import annotations

import asyncio

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.flow.retry import Retries
from sylvan.gateway.http.relay import RetryableStatusError
from sylvan.gateway.observe.families import WorkerFamilies
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.spec import Kind
from sylvan.gateway.workers.worker import Dispatch, Worker


class Attempts:
    """Counts failures against workers, and says when there is to be another attempt.

    Attributes:
        avoid: Ids of workers that have failed at this request.
    """

    def __init__(
        self, retries: Retries, families: WorkerFamilies, health: HealthChecks, endpoint: str
    ) -> None:
        self._retries = retries
        self._families = families
        self._health = health
        self._endpoint = endpoint
        self.avoid: set[str] = set()

    def blame(self, worker: Worker, dispatch: Dispatch, error: UpstreamError) -> None:
        """Count a failed attempt against its worker, if it is to blame."""
        self.avoid.add(worker.id)
        self._families.errors.labels(worker.kind, worker.connection, error.kind).inc()
        if isinstance(error, RetryableStatusError):
            if error.refusal.status < 500:
                dispatch.succeeded()
            elif not error.is_overload:
                dispatch.failed()
            return
        dispatch.failed()
        self._health.suspect(worker)

    async def another(self, kind: Kind) -> bool:
        """Whether the whole request is to be tried again; returns when it is time.

        Args:
            kind: Of the workers that it is for.
        """
        families, labels = self._families, (kind, self._endpoint)
        pause_s = self._retries.next_pause_s()
        if pause_s is None:
            families.exhausted.labels(*labels).inc()
            return False
        families.retries.labels(*labels).inc()
        tries = str(min(self._retries.tries - 1, 10))
        families.backoff.labels(tries).observe(pause_s)
        await asyncio.sleep(pause_s)
        return True
