"""The attempts at one request: which workers to avoid after a failure, and when to retry."""

from __future__ import annotations

import asyncio

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.flow.retry import Retries
from sylvan.gateway.http.relay import RetryableStatusError
from sylvan.gateway.observe.metrics import WorkerMetrics
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.spec import Kind
from sylvan.gateway.workers.worker import Dispatch, Worker


class Attempts:
    """Counts failures against workers, and decides whether to retry.

    Attributes:
        avoid: IDs of workers that failed at this request.
    """

    def __init__(
        self, retries: Retries, metrics: WorkerMetrics, health: HealthChecks, endpoint: str
    ) -> None:
        self._retries = retries
        self._metrics = metrics
        self._health = health
        self._endpoint = endpoint
        self.avoid: set[str] = set()

    def blame(self, worker: Worker, dispatch: Dispatch, error: UpstreamError) -> None:
        """Count a failed attempt against its worker, unless the worker is not to blame."""
        self.avoid.add(worker.id)
        self._metrics.errors.labels(worker.kind, worker.connection, error.kind).inc()
        if isinstance(error, RetryableStatusError):
            if error.refusal.status < 500:
                dispatch.succeeded()
            elif not error.is_overload:
                dispatch.failed()
            return
        dispatch.failed()
        self._health.suspect(worker)

    async def should_retry(self, kind: Kind) -> bool:
        """Decide whether to retry the whole request; wait for the pause before the retry.

        Args:
            kind: Kind of worker to retry on.
        """
        metrics, labels = self._metrics, (kind, self._endpoint)
        pause_s = self._retries.next_pause_s()
        if pause_s is None:
            metrics.exhausted.labels(*labels).inc()
            return False
        metrics.retries.labels(*labels).inc()
        tries = str(min(self._retries.tries - 1, 10))
        metrics.backoff.labels(tries).observe(pause_s)
        await asyncio.sleep(pause_s)
        return True
