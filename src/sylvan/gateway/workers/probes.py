"""Probes each worker over its own protocol."""

from __future__ import annotations

from typing import Protocol

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.workers.probe import HttpProbe, Reported
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Discovered, Worker


class GrpcProbing(Protocol):
    """Probes workers over gRPC; see `GrpcProbe`."""

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker reports that it is healthy."""
        ...

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """Ask a worker about itself."""
        ...

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """Return a worker's load; None if it does not report one."""
        ...


class Probes:
    """Dispatches to HTTP or gRPC; `grpc` is None if gRPC is not installed."""

    def __init__(self, http: HttpProbe, grpc: GrpcProbing | None) -> None:
        self._http = http
        self._grpc = grpc

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker reports that it is healthy."""
        if worker.connection == "http":
            return await self._http.is_healthy(worker, timeout_s)
        return self._grpc is not None and await self._grpc.is_healthy(worker, timeout_s)

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """Ask a worker about itself.

        Raises:
            UpstreamError: It does not answer, or reports that it is unhealthy.
        """
        if spec.connection == "http":
            return await self._http.discover(spec, timeout_s)
        if self._grpc is None:
            message = "gRPC is not installed here: pip install 'sylvan[grpc]'"
            raise UpstreamError(message, kind="status")
        return await self._grpc.discover(spec, timeout_s)

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """Return a worker's load; None if it does not report one."""
        if worker.connection == "http":
            return await self._http.load(worker, timeout_s)
        return None if self._grpc is None else await self._grpc.load(worker, timeout_s)
