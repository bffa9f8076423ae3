"""The standard health service, `grpc.health.v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as pb

from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.grpc.calls import Method, RpcCall
from sylvan.runtime.server.security import Level

NAME = "grpc.health.v1.Health"
WATCH_POLL_S = 0.25


def health_methods(services: Collection[str]) -> Sequence[Method]:
    """Make the methods that report the health of the named services; "" is the whole server."""
    known = {"", *services}

    def status(call: RpcCall) -> pb.HealthCheckResponse:
        reply = pb.HealthCheckResponse
        serving = call.context.engine.ready()
        return reply(status=reply.SERVING if serving else reply.NOT_SERVING)

    async def check(call: RpcCall) -> Message:
        if call.message.service not in known:
            message = f"There is no service {call.message.service[:200]!r}."
            raise RequestError(message, status=404)
        return status(call)

    async def watch(call: RpcCall) -> AsyncGenerator[Message, None]:
        if call.message.service not in known:
            unknown = pb.HealthCheckResponse.SERVICE_UNKNOWN
            yield pb.HealthCheckResponse(status=unknown)
            await asyncio.Event().wait()  # required by the protocol: services may be added later
        last = None
        while True:
            now = status(call)
            if now != last:
                yield now
            last = now
            await asyncio.sleep(WATCH_POLL_S)

    return (
        Method("Check", pb.HealthCheckRequest, unary=check, level=Level.OPEN),
        Method("Watch", pb.HealthCheckRequest, stream=watch, level=Level.OPEN),
    )
