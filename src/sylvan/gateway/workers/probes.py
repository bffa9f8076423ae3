"""Asks each worker in the way that it speaks."""

from __future__ import annotations

from typing import Protocol

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.workers.probe import HttpProbe, Reported
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Discovered, Worker


class GrpcAsking(Protocol):
    """Asks workers over gRPC; see `GrpcProbe`."""

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker says that it is well."""
        ...

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """What a worker says about itself."""
        ...

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """How busy a worker is; None if it does not tell."""
        ...


class Probes:
    """Chooses between HTTP and gRPC; `grpc` is None where that is not installed."""

    def __init__(self, http: HttpProbe, grpc: GrpcAsking | None) -> None:
        self._http = http
        self._grpc = grpc

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker says that it is well."""
        if worker.connection == "http":
            return await self._http.is_healthy(worker, timeout_s)
        return self._grpc is not None and await self._grpc.is_healthy(worker, timeout_s)

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """What a worker says about itself.

        Raises:
            UpstreamError: It does not answer, or not that it is well.
        """
        if spec.connection == "http":
            return await self._http.discover(spec, timeout_s)
        if self._grpc is None:
            message = "gRPC is not installed here: pip install 'sylvan[grpc]'"
            raise UpstreamError(message, kind="status")
        return await self._grpc.discover(spec, timeout_s)

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """How busy a worker is; None if it does not tell."""
        if worker.connection == "http":
            return await self._http.load(worker, timeout_s)
        return None if self._grpc is None else await self._grpc.load(worker, timeout_s)
