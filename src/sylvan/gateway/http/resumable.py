"""Lets clients disconnect from a stream with event IDs and reconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from starlette.types import Message

from sylvan.config.route import FailoverConfig
from sylvan.gateway.http.caller import Caller, CallerGoneError
from sylvan.gateway.http.event_ids import NumberedStream, NumberedStreams

Work = Callable[[Caller], Awaitable[None]]
"""Serves a request; writes the answer to the given caller."""


class ResumableRequests:
    """Runs requests in their own tasks; clients read from the buffered streams.

    A request whose client disconnected runs on for `failover.resume_s`, then is aborted unless the
    client has reconnected.
    """

    def __init__(self, config: FailoverConfig) -> None:
        self._config = config
        self._streams = NumberedStreams(config)
        self._tasks: dict[NumberedStream, asyncio.Task[None]] = {}

    def wanted(self, caller: Caller) -> bool:
        """Whether a client asks for a stream to which it can reconnect."""
        return self._streams.wanted(caller)

    async def serve(self, caller: Caller, work: Work) -> None:
        """Serve a request so that its client can reconnect.

        Raises:
            CallerGoneError: The client disconnected; the request runs on.
        """
        stream = self._streams.open(caller.tenant)
        recorded = caller.recorded(_recorder(stream))
        task = asyncio.get_running_loop().create_task(self._run(stream, recorded, work))
        self._tasks[stream] = task
        await self._follow(caller, stream, -1)

    async def resume(self, caller: Caller) -> bool:
        """Continue the stream to which a client reconnects; False if it names none.

        Raises:
            RequestError: The stream is gone.
            CallerGoneError: The client disconnected again.
        """
        found = self._streams.find(caller)
        if found is None:
            return False
        await self._follow(caller, *found)
        return True

    async def close(self) -> None:
        """Abort all requests that run without a client."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, stream: NumberedStream, recorded: Caller, work: Work) -> None:
        try:
            with contextlib.suppress(CallerGoneError):
                await work(recorded)
        finally:
            stream.end()
            self._tasks.pop(stream, None)
            self._streams.forget_later(stream)

    async def _follow(self, caller: Caller, stream: NumberedStream, after: int) -> None:
        stream.readers += 1
        try:
            await caller.until_gone(self._pass_on(caller, stream, after))
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.ended:
                loop = asyncio.get_running_loop()
                loop.call_later(self._config.resume_s, self._end_unread, stream)

    async def _pass_on(self, caller: Caller, stream: NumberedStream, after: int) -> None:
        await stream.begun()
        if stream.status is None:
            raise CallerGoneError  # the request failed without an answer; close the connection
        await caller.start(stream.status, stream.headers)
        async with aclosing(stream.read(after)) as parts:
            async for part in parts:
                await caller.write(part)
        await caller.write(b"", more=False)

    def _end_unread(self, stream: NumberedStream) -> None:
        task = self._tasks.get(stream)
        if task is not None and not stream.readers:
            task.cancel()


def _recorder(stream: NumberedStream) -> Callable[[Message], Awaitable[None]]:
    async def record(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]]
            stream.begin(message["status"], headers)
        elif message["type"] == "http.response.body":
            stream.add(message.get("body", b""))
            if not message.get("more_body", False):
                stream.end()

    return record
