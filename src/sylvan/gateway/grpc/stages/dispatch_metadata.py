"""Stage 5: the call's metadata: keys, the tenant, the trace."""

from __future__ import annotations

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.grpc.metadata import metadata_of
from sylvan.gateway.workers.grpc_probe import GrpcProbe


class DispatchMetadata:
    """Builds the metadata of the call."""

    name = "dispatch_metadata"

    def __init__(self, probe: GrpcProbe) -> None:
        self._probe = probe

    async def run(self, context: RequestContext) -> None:
        worker, caller = context.placed.worker, context.input.caller
        context.state.metadata = metadata_of(self._probe, worker, caller)
