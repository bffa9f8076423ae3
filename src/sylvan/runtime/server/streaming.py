"""Answers that are sent piece by piece, and calls whose client may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sylvan.protocol.errors import SylvanError
from sylvan.runtime.server.body import ClientGoneError

GONE = "sylvan.client_gone"  # key of the ASGI scope; read by the access log

T = TypeVar("T")


class EventStream(Response):
    """Sends what `chunks` yields until its end, or until the client leaves.

    `chunks` is closed in every case. Sending waits while the client is slow; what comes up in the
    meantime is the source's to merge.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, headers, f"{media_type}; charset=utf-8")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        pump = asyncio.create_task(self._pump(start, send))
        gone = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                scope[GONE] = True
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await self._chunks.aclose()
        if not pump.cancelled() and (error := pump.exception()) is not None:
            raise error

    async def _pump(self, start: Mapping[str, object], send: Send) -> None:
        await send(dict(start))
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError:  # some servers raise it when the client has left
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    The body must have been read.

    Raises:
        ClientGoneError: The client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_client_left(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if task.cancelled():
        request.scope[GONE] = True
        raise ClientGoneError
    return task.result()


async def primed(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    on_error: Callable[[SylvanError], bytes],
) -> AsyncGenerator[bytes, None]:
    """The same chunks, the first of which is there already.

    What goes wrong before it still decides the status of the answer; what goes wrong later becomes
    the last chunk, made by `on_error`.

    Raises:
        ClientGoneError: The client left before the first chunk.
    """
    try:
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return _with_first(first, chunks, on_error)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None], on_error: Callable[[SylvanError], bytes]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for chunk in rest:
            yield chunk
    except SylvanError as error:
        yield on_error(error)
    finally:
        await rest.aclose()


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
