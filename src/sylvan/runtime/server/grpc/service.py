"""The methods of the scheduler service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NoReturn

import msgspec
from google.protobuf.message import Message

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import FlushCache
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.grpc import info_methods
from sylvan.runtime.server.grpc.cache_events import cache_events
from sylvan.runtime.server.grpc.calls import Method, RpcCall
from sylvan.runtime.server.grpc.replies import SampleReplies, vector_reply
from sylvan.runtime.server.grpc.requests import embed_input, generate_input
from sylvan.runtime.server.security import Level
from sylvan.runtime.tokenizer.types import error_of
from sylvan.utils.threads import call_in_thread

FLUSH_POLL_S = 0.05
MAX_FLUSH_S = 60.0


async def generate(call: RpcCall) -> AsyncGenerator[Message, None]:
    """Generate tokens; closing the stream aborts the request."""
    message: pb.GenerateRequest = call.message
    if message.emitted and not call.from_gateway:
        text = "emitted is for gateways, and this server does not know you as one."
        raise RequestError(text, param="emitted", status=403)
    inp = generate_input(message, call.tenant.name, call.deadline_s, call.context.parsers)
    inp = msgspec.structs.replace(inp, origin=call.context.service.origin)
    samples = [
        SampleReplies(message.request_id, inp.logprobs, message.stream)
        for _ in range(inp.sampling.n)
    ]
    for given in inp.past or ():
        if given.index < len(samples):  # otherwise it is rejected
            samples[given.index].begin(given.token_ids)
    async with aclosing(call.context.engine.generate(inp)) as deltas:
        async for delta in deltas:
            if (error := error_of(delta.finish)) is not None:
                raise error
            for reply in samples[delta.index].add(delta):
                yield reply


async def embed(call: RpcCall) -> Message:
    """Embed a text."""
    inp = embed_input(call.message, call.tenant.name, call.deadline_s)
    inp = msgspec.structs.replace(inp, origin=call.context.service.origin)
    return vector_reply(await call.context.engine.embed(inp))


async def health_check(call: RpcCall) -> Message:
    """Report whether requests are served."""
    healthy = call.context.engine.ready()
    return pb.HealthCheckResponse(healthy=healthy, message=call.context.engine.state)


async def abort(call: RpcCall) -> Message:
    """Abort a request of the caller."""
    message: pb.AbortRequest = call.message
    if not message.request_id:
        raise RequestError("request_id must be given", param="request_id")
    tenant = None if call.tenant.admin else call.tenant.name
    found = call.context.engine.abort(message.request_id, tenant)
    why = "" if found else f"There is no request {message.request_id[:200]!r}."
    return pb.AbortResponse(success=found, message=why)


async def get_model_info(call: RpcCall) -> Message:
    """Describe the model."""
    info = info_methods.model_info(call.context)
    info.continues_requests = call.from_gateway
    return info


async def get_server_info(call: RpcCall) -> Message:
    """Return settings and state."""
    return info_methods.server_info(call.context)


async def get_loads(call: RpcCall) -> Message:
    """Return the load of the schedulers."""
    return info_methods.loads(call.context, call.message)


async def flush_cache(call: RpcCall) -> Message:
    """Empty the prefix cache, once no request runs or the timeout expires."""
    message: common.FlushCacheRequest = call.message
    if not 0 <= message.timeout_s <= MAX_FLUSH_S:
        text = f"timeout_s must be 0 to {MAX_FLUSH_S:g}"
        raise RequestError(text, param="timeout_s")
    left = int(message.timeout_s / FLUSH_POLL_S)
    reply = await call.context.engine.control(FlushCache())
    while not reply.ok and left > 0:
        left -= 1
        await asyncio.sleep(FLUSH_POLL_S)
        reply = await call.context.engine.control(FlushCache())
    return common.FlushCacheResponse(success=reply.ok, message=reply.message)


async def get_tokenizer(call: RpcCall) -> AsyncGenerator[Message, None]:
    """Return the tokenizer's files."""
    context = call.context
    folder = str(context.settings.shown.get("tokenizer") or context.engine.facts.model_path)
    for chunk in await call_in_thread(lambda: list(info_methods.tokenizer_chunks(folder))):
        yield chunk


async def subscribe_kv_events(call: RpcCall) -> AsyncGenerator[Message, None]:
    """Stream cache events for routers."""
    if call.tenant.name and not call.tenant.admin:
        raise RequestError("Cache events reveal prompts of others: not for tenants.", status=403)
    message: common.SubscribeKvEventsRequest = call.message
    found = cache_events(
        call.context,
        message.start_sequence_number,
        with_load=message.load_records_before_first_batch,
    )
    async with aclosing(found) as batches:
        async for batch in batches:
            yield batch


async def list_adapters(call: RpcCall) -> Message:
    """List the adapters that the caller may use."""
    served = call.context.engine.adapters.served(call.tenant.name)
    return pb.ListLoadedLoRAAdaptersResponse(
        loaded_adapters=[
            pb.LoadedLoRAAdapter(
                lora_id=info.id, lora_name=info.name, lora_path=info.path, pinned=info.pinned
            )
            for info in served
        ]
    )


async def load_adapter(call: RpcCall) -> Message:
    """Load an adapter from a directory."""
    request, adapters = call.message, call.context.engine.adapters
    info = await adapters.load(request.lora_name, request.lora_path, pinned=request.pinned)
    ids = [each.id for each in adapters.served()]
    return pb.LoadLoRAAdapterResponse(success=True, message=info.id, loaded_lora_ids=ids)


async def unload_adapter(call: RpcCall) -> Message:
    """Unload an adapter."""
    adapters = call.context.engine.adapters
    info = await adapters.unload(call.message.lora_name)
    ids = [each.id for each in adapters.served()]
    return pb.UnloadLoRAAdapterResponse(success=True, message=info.id, loaded_lora_ids=ids)


async def profile(call: RpcCall) -> NoReturn:
    """Start or stop a profile."""
    raise RequestError("Profiling is not available over gRPC.", status=501)


_OPERATOR = Level.ADMIN_OPTIONAL

METHODS: Sequence[Method] = (
    Method("Generate", pb.GenerateRequest, stream=generate, budgeted=True),
    Method("Embed", pb.EmbedRequest, unary=embed, budgeted=True),
    Method("HealthCheck", pb.HealthCheckRequest, unary=health_check, level=Level.OPEN),
    Method("Abort", pb.AbortRequest, unary=abort),
    Method("GetModelInfo", pb.GetModelInfoRequest, unary=get_model_info),
    Method("GetServerInfo", pb.GetServerInfoRequest, unary=get_server_info, level=_OPERATOR),
    Method("GetLoads", pb.GetLoadsRequest, unary=get_loads),
    Method("FlushCache", common.FlushCacheRequest, unary=flush_cache, level=_OPERATOR),
    Method("StartProfile", common.StartProfileRequest, unary=profile, level=_OPERATOR),
    Method("StopProfile", common.StopProfileRequest, unary=profile, level=_OPERATOR),
    Method("GetTokenizer", common.GetTokenizerRequest, stream=get_tokenizer),
    Method(
        "SubscribeKvEvents",
        common.SubscribeKvEventsRequest,
        stream=subscribe_kv_events,
        level=_OPERATOR,
    ),
    Method("LoadLoRAAdapter", pb.LoadLoRAAdapterRequest, unary=load_adapter, level=_OPERATOR),
    Method("UnloadLoRAAdapter", pb.UnloadLoRAAdapterRequest, unary=unload_adapter, level=_OPERATOR),
    Method("ListLoadedLoRAAdapters", pb.ListLoadedLoRAAdaptersRequest, unary=list_adapters),
)
