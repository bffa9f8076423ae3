"""The route `/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response

from sylvan.api.errors import Family, error_body
from sylvan.api.native import GenerateBody
from sylvan.protocol.errors import SylvanError
from sylvan.runtime.server.endpoint import Call, error_parts, json_response
from sylvan.runtime.server.sse import DONE, event
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.native import NativeCall


async def generate(call: Call[GenerateBody]) -> Response:
    """Generate for one prompt, or a list of prompts."""
    context = call.context
    native, detached = NativeCall(context.service, call.body, call.tenant.name), context.detached
    detach = bool(call.body.background)
    if call.body.stream:
        events = detached.stream(_events(native)) if detach else _events(native)
        chunks = await await_first_chunk(call.request, events, native_error_event)
        return EventStream(chunks)
    work = detached.whole(native.whole()) if detach else native.whole()
    return json_response(await cancel_on_disconnect(call.request, work))


async def _events(native: NativeCall) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a streaming call."""
    async with aclosing(native.stream()) as replies:
        async for reply in replies:
            yield event(reply)
    yield DONE


def native_error_event(error: SylvanError) -> bytes:
    """Return the last event of a failed stream."""
    status, message, param = error_parts(error)
    return event(error_body(Family.NATIVE, status, message, param=param)) + DONE
