"""Stage 3: the connection to the worker."""

from __future__ import annotations

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.upstream.grpc import GrpcUpstream


class ClientAcquisition:
    """Takes the client whose channels to workers are kept open."""

    name = "client_acquisition"

    def __init__(self, upstream: GrpcUpstream) -> None:
        self._upstream = upstream

    async def run(self, context: RequestContext) -> None:
        context.state.client = self._upstream
