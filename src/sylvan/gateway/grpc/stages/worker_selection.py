"""Stage 2: a policy selects the worker; for a pair, one policy for each side."""

from __future__ import annotations

from array import array

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.grpc.prefill import Prefill
from sylvan.gateway.placement import PlacedRequest, RequestPlacer
from sylvan.gateway.policies.api import RoutingRequest
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Kind


class WorkerSelection:
    """Selects among healthy workers with a closed circuit, by the prompt's token IDs."""

    name = "worker_selection"

    def __init__(self, registry: Registry, placing: RequestPlacer) -> None:
        self._registry = registry
        self._placing = placing

    async def run(self, context: RequestContext) -> None:
        prepared, caller = context.prepared, context.input.caller
        request = RoutingRequest(
            prompt=array("i", prepared.input_ids).tobytes(),
            namespace=f"{caller.tenant}/{prepared.namespace}",
            key=caller.headers.get("x-smg-routing-key", ""),
            token_ids=prepared.input_ids,
        )
        state = context.state
        kind: Kind = "regular"
        if self._registry.paired(prepared.model, "grpc"):
            state.prefill = Prefill(self._place(context, request, "prefill"))
            kind = "decode"
        placed = self._place(context, request, kind)
        state.placed = placed
        state.dispatch = placed.worker.begin(placed.placement.new_tokens)

    def _place(self, context: RequestContext, request: RoutingRequest, kind: Kind) -> PlacedRequest:
        state = context.state
        return self._placing.place(
            context.prepared.model,
            request,
            kind=kind,
            connection="grpc",
            avoid=state.avoid,
            continuing=state.begun and kind == "regular",
        )
