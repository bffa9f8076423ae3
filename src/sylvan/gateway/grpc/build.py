"""Builds the gRPC router."""

from __future__ import annotations

import asyncio

from sylvan.config.route import RouteConfig
from sylvan.gateway.grpc.router import GrpcParts, GrpcRouter
from sylvan.gateway.http.exchange import ExchangeParts
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.upstream.grpc import GrpcUpstream
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.worker import Worker


class GrpcComponents:
    """Channels, probe, text processing and router for workers that speak gRPC.

    Attributes:
        upstream: The channels; enter it before use.
        probe: Probes workers.
    """

    def __init__(self, config: RouteConfig) -> None:
        self.upstream = GrpcUpstream(config.workers)
        follows = config.routing.cache_events
        self.probe = GrpcProbe(self.upstream, config.workers, settings=follows)
        self._closing: set[asyncio.Task[None]] = set()

    def removed(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        if worker.connection != "grpc":
            return
        task = asyncio.get_running_loop().create_task(self.upstream.forget(worker.spec.url))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def tokenizer(self, worker: Worker) -> tuple[bytes, str]:
        return await self.probe.tokenizer(worker)

    def router(self, exchange: ExchangeParts, library: TextLibrary) -> GrpcRouter:
        """Build the router, with parts shared with the HTTP router."""
        return GrpcRouter(
            GrpcParts(
                registry=exchange.registry,
                placing=exchange.placing,
                library=library,
                upstream=self.upstream,
                probe=self.probe,
                health=exchange.health,
                recovery=exchange.recovery,
                metrics=exchange.metrics,
                budget=exchange.budget,
                retry=exchange.retry,
                failover=exchange.failover,
                limits=exchange.limits,
                clock=exchange.clock,
                wall=exchange.wall,
            )
        )
