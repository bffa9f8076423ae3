"""Lets clients leave a stream with event ids and come back to it."""

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
"""Serves a request; its answer goes to the caller it is given."""


class Following:
    """Serves requests in tasks of their own, and has clients read what they give.

    A request whose client left goes on for `failover.resume_s`, and is ended if nobody came back.
    """

    def __init__(self, config: FailoverConfig) -> None:
        self._config = config
        self._streams = NumberedStreams(config)
        self._tasks: dict[NumberedStream, asyncio.Task[None]] = {}

    def wanted(self, caller: Caller) -> bool:
        """Whether a client wants to be able to come back."""
        return self._streams.wanted(caller)

    async def serve(self, caller: Caller, work: Work) -> None:
        """Serve a request such that its client can come back.

        Raises:
            CallerGoneError: The client left; the request goes on.
        """
        stream = self._streams.open(caller.tenant)
        recorded = caller.recorded(_recorder(stream))
        task = asyncio.get_running_loop().create_task(self._run(stream, recorded, work))
        self._tasks[stream] = task
        await self._follow(caller, stream, -1)

    async def resume(self, caller: Caller) -> bool:
        """Go on with the stream that a client comes back to; False if it names none.

        Raises:
            RequestError: There is no such stream any more.
            CallerGoneError: The client left again.
        """
        found = self._streams.find(caller)
        if found is None:
            return False
        await self._follow(caller, *found)
        return True

    async def close(self) -> None:
        """End all requests that go on without a client."""
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
            raise CallerGoneError  # it failed without an answer; the connection is closed
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
