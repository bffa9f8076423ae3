"""Streamed answers, and calls whose client may disconnect."""

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
UNWATCHED_S = 0.05

T = TypeVar("T")


class EventStream(Response):
    """Sends what `chunks` yields until its end, or until the client disconnects.

    Always closes `chunks`. Sending waits while the client is slow; the source merges what
    accumulates meanwhile.
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
        except OSError:  # some servers raise it when the client disconnected
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects first.

    The body must have been read. The connection is not watched for the first moments: a short call
    ends before that, and starting the watch costs more than many a short call.

    Raises:
        ClientGoneError: The client disconnected.
    """
    watch = _Watch(request)
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.client_left:
            raise
        watch.task.uncancel()
        request.scope[GONE] = True
        raise ClientGoneError from None
    finally:
        watch.end()


class _Watch:
    """Cancels the task that created it when the client disconnects."""

    def __init__(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None, "called outside of a task"
        self.task = task
        self.client_left = False
        self._request = request
        self._watching: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(UNWATCHED_S, self._begin)

    def end(self) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        await _client_left(self._request.receive)
        self.client_left = True
        self.task.cancel()


async def await_first_chunk(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    on_error: Callable[[SylvanError], bytes],
) -> AsyncGenerator[bytes, None]:
    """Return the same chunks after awaiting the first one.

    An error before the first chunk still decides the status of the answer; a later error becomes
    the last chunk, made by `on_error`.

    Raises:
        ClientGoneError: The client disconnected before the first chunk.
    """
    try:
        first = await cancel_on_disconnect(request, anext(chunks))
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
