"""gRPC workers, over scripted engines or with made-up answers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from sylvan.config.tree import ServerConfig
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.app import app_of
from sylvan.runtime.server.context import make_context
from sylvan.runtime.server.grpc.server import SERVICE, GrpcServer
from sylvan.text.tokenizer import Tokenizer
from tests.support.cluster import _beat, served
from tests.support.scripted import ScriptedEngine, make_engine
from tests.support.settings import settings_of


@dataclass
class Both:
    """One engine that is served over HTTP and gRPC."""

    http: str
    grpc: str
    engine: ScriptedEngine


@asynccontextmanager
async def both(folder, facts=None, **settings):
    engine = make_engine(folder, Tokenizer.load(folder), **(facts or {}))
    settings.setdefault("served_model_name", "scripted")
    context = make_context(engine.manager, settings_of(**settings))
    engine.scheduler.beat()
    beating = asyncio.create_task(_beat(engine))
    try:
        async with (
            served(app_of(context)) as url,
            GrpcServer(context, ServerConfig(grpc_port=0)) as server,
        ):
            yield Both(url, f"grpc://127.0.0.1:{server.port}", engine)
    finally:
        beating.cancel()
        engine.manager.close()


@asynccontextmanager
async def garbage(*replies, asked=None, fail=None):
    """Run a worker whose answers to `Generate` are made up.

    `asked` collects its requests; `fail` is the error that it answers with, or "hold" to never
    answer.
    """

    async def generate(data, rpc):
        if asked is not None:
            asked.append(pb.GenerateRequest.FromString(data))
        if fail == "hold":
            await asyncio.sleep(60)
        elif fail is not None:
            await rpc.abort(fail, "it does not work")
        for reply in replies:
            yield reply if isinstance(reply, bytes) else reply.SerializeToString()

    async def healthy(data, rpc):
        return pb.HealthCheckResponse(healthy=True).SerializeToString()

    async def info(data, rpc):
        return pb.GetModelInfoResponse(served_model_name="g").SerializeToString()

    async def loads(data, rpc):
        return b""

    unary = grpc.unary_unary_rpc_method_handler
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "HealthCheck": unary(healthy),
        "GetModelInfo": unary(info),
        "GetLoads": unary(loads),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def chunk(index=0):
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(index=index, token_ids=[70]))


def complete(reason):
    return pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=reason))
