"""Stage 6: the call, up to its first reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from sylvan.gateway.grpc.context import RequestContext, garbage
from sylvan.rpc import scheduler_pb2 as pb


class RequestExecution:
    """Starts the call, and waits for the first reply: until then another worker may take over."""

    name = "request_execution"

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s

    async def run(self, context: RequestContext) -> None:
        """See `Stage.run`."""
        state = context.state
        assert state.client is not None, "client acquisition comes first"
        assert state.dispatch is not None, "worker selection comes first"
        url = context.placed.worker.spec.url
        replies = state.client.generate(url, context.message, state.metadata, self._stall_s)
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
