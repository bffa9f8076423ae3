"""Stage 3: the connection to the worker."""

from __future__ import annotations

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.upstream.grpc import GrpcUpstream


class ClientAcquisition:
    """Gets the client that keeps channels to workers open."""

    name = "client_acquisition"

    def __init__(self, upstream: GrpcUpstream) -> None:
        self._upstream = upstream

    async def run(self, context: RequestContext) -> None:
        context.state.client = self._upstream
