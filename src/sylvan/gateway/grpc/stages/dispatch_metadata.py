"""Stage 5: what goes to the worker beside the message: keys, the tenant, the trace."""

from __future__ import annotations

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.observe.spans import TRACE_HEADERS
from sylvan.gateway.workers.grpc_probe import GrpcProbe

TENANT_KEY = "x-sylvan-tenant"


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
        trace = caller.span.headers()
        if trace is None:
            trace = [(name, v) for name in TRACE_HEADERS if (v := caller.headers.get(name))]
        pairs += trace
        context.state.metadata = pairs
