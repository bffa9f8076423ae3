"""A client of the scheduler service over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from sylvan.config.tree import ServerConfig
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.context import make_context
from sylvan.runtime.server.grpc.server import SERVICE, GrpcServer
from sylvan.text.tokenizer import Tokenizer
from tests.support.scripted import ScriptedEngine, make_engine
from tests.support.settings import settings_of

REPLIES: dict[str, Any] = {
    "Generate": pb.GenerateResponse,
    "Embed": pb.EmbedResponse,
    "HealthCheck": pb.HealthCheckResponse,
    "Abort": pb.AbortResponse,
    "GetModelInfo": pb.GetModelInfoResponse,
    "GetServerInfo": pb.GetServerInfoResponse,
    "GetLoads": pb.GetLoadsResponse,
    "FlushCache": common.FlushCacheResponse,
    "StartProfile": common.ProfileResponse,
    "GetTokenizer": common.GetTokenizerChunk,
    "SubscribeKvEvents": common.KvEventBatch,
    "LoadLoRAAdapter": pb.LoadLoRAAdapterResponse,
    "UnloadLoRAAdapter": pb.UnloadLoRAAdapterResponse,
    "ListLoadedLoRAAdapters": pb.ListLoadedLoRAAdaptersResponse,
}


class GrpcClient:
    """Calls methods of a server by name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def generate(self, message: pb.GenerateRequest, **options: Any) -> Any:
        path = f"/{SERVICE}/Generate"
        call = self.channel.unary_stream(
            path,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        return call(message, **options)

    async def all(self, message: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
        return [reply async for reply in self.generate(message, **options)]

    async def stream(self, name: str, message: Any) -> list[Any]:
        call = self.channel.unary_stream(
            f"/{SERVICE}/{name}", response_deserializer=REPLIES[name].FromString
        )
        return [reply async for reply in call(message.SerializeToString())]

    async def call(self, name: str, message: Any = b"", **options: Any) -> Any:
        method = self.channel.unary_unary(
            f"/{SERVICE}/{name}", response_deserializer=REPLIES[name].FromString
        )
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return await method(data, **options)


class RunningGrpc(GrpcClient):
    """A server over a scripted engine, and a client of it."""

    def __init__(self, channel: grpc.aio.Channel, engine: ScriptedEngine, port: int) -> None:
        super().__init__(channel)
        self.engine = engine
        self.port = port


@asynccontextmanager
async def grpc_served(folder: Path, **settings: Any) -> AsyncIterator[RunningGrpc]:
    """The service over an engine that follows a script."""
    engine = make_engine(folder, Tokenizer.load(folder))
    context = make_context(engine.manager, settings_of(**settings))
    engine.scheduler.beat()
    config = ServerConfig(grpc_port=0, max_body_bytes=1 << 16)
    try:
        async with (
            GrpcServer(context, config) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            yield RunningGrpc(channel, engine, server.port)
    finally:
        engine.manager.close()
