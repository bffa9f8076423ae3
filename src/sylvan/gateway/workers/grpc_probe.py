"""Probes the health and capabilities of gRPC workers."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from sylvan.config.route import WorkersConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.upstream.grpc import GrpcUpstream, Metadata
from sylvan.gateway.workers.events import EVENT_SETTINGS
from sylvan.gateway.workers.probe import Reported
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Discovered, Worker
from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import KEY_HEADER
from sylvan.rpc import scheduler_pb2 as pb


class GrpcProbe:
    """Like `HttpProbe`, over gRPC."""

    def __init__(
        self, upstream: GrpcUpstream, workers: WorkersConfig, *, settings: bool = False
    ) -> None:
        """With `settings`, also ask new workers for their settings."""
        self._upstream = upstream
        self._workers = workers
        self._settings = settings

    def metadata(self, spec: WorkerSpec) -> Metadata:
        """Return the metadata that authenticates the gateway."""
        key = self._workers.gateway_key
        pairs = [] if key is None else [(KEY_HEADER, key.reveal())]
        if spec.api_key is not None:
            pairs.append(("authorization", f"Bearer {spec.api_key}"))
        return pairs

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker reports that it is healthy."""
        try:
            reply = await self._upstream.call(
                worker.spec.url,
                "HealthCheck",
                pb.HealthCheckRequest(),
                pb.HealthCheckResponse,
                self.metadata(worker.spec),
                timeout_s,
            )
        except (UpstreamError, RequestError):
            return False
        return reply.healthy

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """Ask a worker about itself.

        Raises:
            UpstreamError: It does not answer, or reports that it is unhealthy.
        """
        metadata, upstream = self.metadata(spec), self._upstream
        try:
            health = await upstream.call(
                spec.url,
                "HealthCheck",
                pb.HealthCheckRequest(),
                pb.HealthCheckResponse,
                metadata,
                timeout_s,
            )
            if not health.healthy:
                raise UpstreamError(
                    f"The worker is unhealthy: {health.message[:200]}", kind="status"
                )
            model = await upstream.call(
                spec.url,
                "GetModelInfo",
                pb.GetModelInfoRequest(),
                pb.GetModelInfoResponse,
                metadata,
                timeout_s,
            )
            loads = await self._loads(spec, timeout_s)
        except RequestError as error:
            raise UpstreamError(str(error), kind="status") from error
        name = model.served_model_name or model.model_path
        return Discovered(
            journals=model.continues_requests,
            models=(name,) if name else (),
            capacity_tokens=sum(row.max_total_num_tokens for row in loads.loads),
            version=loads.version,
            details={
                "model_path": model.model_path,
                "is_generation": model.is_generation,
                "max_model_len": model.max_context_length,
                "model_type": model.model_type,
                "served_model_name": model.served_model_name,
            },
            settings=await self._event_settings(spec, timeout_s) if self._settings else {},
        )

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """Return a worker's load; None if it does not report one."""
        try:
            loads = await self._loads(worker.spec, timeout_s)
        except (UpstreamError, RequestError):
            return None
        rows = loads.loads
        if not rows:
            return None
        return Reported(
            sum(row.num_total_reqs for row in rows), sum(row.max_total_num_tokens for row in rows)
        )

    async def tokenizer(self, worker: Worker, timeout_s: float = 60.0) -> tuple[bytes, str]:
        """Download the worker's tokenizer; see `GrpcUpstream.tokenizer`."""
        metadata = self.metadata(worker.spec)
        return await self._upstream.tokenizer(worker.spec.url, metadata, timeout_s)

    async def _event_settings(self, spec: WorkerSpec, timeout_s: float) -> dict[str, Any]:
        try:
            reply = await self._upstream.call(
                spec.url,
                "GetServerInfo",
                pb.GetServerInfoRequest(),
                pb.GetServerInfoResponse,
                self.metadata(spec),
                timeout_s,
            )
        except (UpstreamError, RequestError):  # for operators only
            return {}
        settings: dict[str, Any] = MessageToDict(reply.server_args)
        return {name: settings[name] for name in EVENT_SETTINGS if settings.get(name)}

    async def _loads(self, spec: WorkerSpec, timeout_s: float) -> pb.GetLoadsResponse:
        return await self._upstream.call(
            spec.url,
            "GetLoads",
            pb.GetLoadsRequest(),
            pb.GetLoadsResponse,
            self.metadata(spec),
            timeout_s,
        )
