"""Stage 6: makes the call, up to the first reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from sylvan.gateway.grpc.context import RequestContext, garbage
from sylvan.gateway.grpc.metadata import metadata_of
from sylvan.gateway.upstream.grpc import CallWatch, Metadata
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.worker import Worker
from sylvan.rpc import scheduler_pb2 as pb

ALIVE_S = 2.0
"""Seconds within which a silent worker must answer a health check."""


class RequestExecution:
    """Starts the call, and waits for the first reply.

    A worker may be silent for long while it computes. A worker that does not answer a health
    check either counts as lost.
    """

    name = "request_execution"

    def __init__(self, probe: GrpcProbe, stall_s: float) -> None:
        self._probe = probe
        self._stall_s = stall_s

    async def run(self, context: RequestContext) -> None:
        state = context.state
        assert state.dispatch is not None, "worker selection comes first"
        replies = self._call(context, context.placed.worker, state.metadata)
        state.replies = replies
        first = await self._first(context, replies)
        if first is None:
            raise garbage("nothing at all")
        state.dispatch.answered()
        state.replies = _after(first, replies)

    def _call(
        self, context: RequestContext, worker: Worker, metadata: Metadata
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        assert context.state.client is not None, "client acquisition comes first"
        watch = CallWatch(self._stall_s, lambda: self._probe.is_healthy(worker, ALIVE_S))
        return context.state.client.generate(worker.spec.url, context.message, metadata, watch)

    async def _first(
        self, context: RequestContext, replies: AsyncGenerator[pb.GenerateResponse, None]
    ) -> pb.GenerateResponse | None:
        """Wait for the first reply; in a pair, fail as soon as the prefill worker fails."""
        prefill = context.state.prefill
        if prefill is None:
            return await anext(replies, None)
        metadata = metadata_of(self._probe, prefill.worker, context.input.caller)
        feeding = prefill.begin(self._call(context, prefill.worker, metadata))
        reading = asyncio.ensure_future(anext(replies, None))
        try:
            await asyncio.wait((feeding, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await feeding  # without this KV, the decode worker would wait in vain
            return await reading
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _after(
    first: pb.GenerateResponse, rest: AsyncGenerator[pb.GenerateResponse, None]
) -> AsyncGenerator[pb.GenerateResponse, None]:
    try:
        yield first
        async for reply in rest:
            yield reply
    finally:
        await rest.aclose()
