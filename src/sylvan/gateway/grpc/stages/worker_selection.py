"""Stage 2: a policy chooses the worker."""

from __future__ import annotations

from array import array

from sylvan.gateway.grpc.context import RequestContext
from sylvan.gateway.placing import Placing
from sylvan.gateway.policies.api import RoutingRequest


class WorkerSelection:
    """Chooses among healthy workers whose circuit is closed, by the token ids of the prompt."""

    name = "worker_selection"

    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    async def run(self, context: RequestContext) -> None:
        """See `Stage.run`."""
        prepared, caller = context.prepared, context.input.caller
        request = RoutingRequest(
            prompt=array("i", prepared.input_ids).tobytes(),
            namespace=f"{caller.tenant}/{prepared.namespace}",
            key=caller.headers.get("x-smg-routing-key", ""),
            token_ids=prepared.input_ids,
        )
        state = context.state
        placed = self._placing.place(
            prepared.model,
            request,
            connection="grpc",
            avoid=state.avoid,
            continuing=state.begun,
        )
        state.placed = placed
        state.dispatch = placed.worker.begin(placed.placement.new_tokens)
