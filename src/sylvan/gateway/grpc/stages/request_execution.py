"""Stage 6: the call, up to its first reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from sylvan.gateway.grpc.context import RequestContext, garbage
from sylvan.gateway.upstream.grpc import Watch
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.rpc import scheduler_pb2 as pb

ALIVE_S = 2.0
"""A worker that has been silent must answer within so many seconds that it is well."""


class RequestExecution:
    """Starts the call, and waits for the first reply.

    A worker may be silent for long while it computes; one that does not even say that it is well is
    lost.
    """

    name = "request_execution"

    def __init__(self, probe: GrpcProbe, stall_s: float) -> None:
        self._probe = probe
        self._stall_s = stall_s

    async def run(self, context: RequestContext) -> None:
        """See `Stage.run`."""
        state = context.state
        assert state.client is not None, "client acquisition comes first"
        assert state.dispatch is not None, "worker selection comes first"
        worker = context.placed.worker
        replies = state.client.generate(
            worker.spec.url,
            context.message,
            state.metadata,
            Watch(self._stall_s, lambda: self._probe.is_healthy(worker, ALIVE_S)),
        )
        state.replies = replies
        first = await anext(replies, None)
        if first is None:
            raise garbage("nothing at all")
        state.dispatch.answered()
        state.replies = _after(first, replies)


async def _after(
    first: pb.GenerateResponse, rest: AsyncGenerator[pb.GenerateResponse, None]
) -> AsyncGenerator[pb.GenerateResponse, None]:
    try:
        yield first
        async for reply in rest:
            yield reply
    finally:
        await rest.aclose()
