"""Stage 5: what goes to the worker beside the message: keys, the tenant, the trace."""

from __future__ import annotations

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.workers.grpc_probe import GrpcProbe

TENANT_KEY = "x-sylvan-tenant"
_TRACE = ("traceparent", "tracestate")


class DispatchMetadata:
    """Makes the metadata of the call."""

    name = "dispatch_metadata"

    def __init__(self, probe: GrpcProbe) -> None:
        self._probe = probe

    async def run(self, context: RequestContext) -> None:
        """See `Stage.run`."""
        caller = context.input.caller
        pairs = [*self._probe.metadata(context.placed.worker.spec)]
        pairs.append(("x-request-id", caller.request_id))
        if caller.tenant:
            pairs.append((TENANT_KEY, caller.tenant))
        pairs += [(name, value) for name in _TRACE if (value := caller.headers.get(name))]
        context.state.metadata = pairs
