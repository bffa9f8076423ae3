"""Metadata of calls to workers: keys, tenant, trace."""

from __future__ import annotations

from sylvan.gateway.http.caller import Caller
from sylvan.gateway.observe.spans import TRACE_HEADERS
from sylvan.gateway.upstream.grpc import Metadata
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.worker import Worker

TENANT_KEY = "x-sylvan-tenant"


def metadata_of(probe: GrpcProbe, worker: Worker, caller: Caller) -> Metadata:
    """Return the metadata that accompanies a client's request."""
    pairs = [*probe.metadata(worker.spec), ("x-request-id", caller.request_id)]
    if caller.tenant:
        pairs.append((TENANT_KEY, caller.tenant))
    trace = caller.span.headers()
    if trace is None:
        trace = [(name, v) for name in TRACE_HEADERS if (v := caller.headers.get(name))]
    return [*pairs, *trace]
