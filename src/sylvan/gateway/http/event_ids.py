"""Streams whose events have ids, so that a client that lost its connection can go on.

A client asks for ids with the header `x-sylvan-event-ids: 1`. Each event then begins with a line
`id: STREAM-NUMBER`. A client that comes back with `Last-Event-ID` gets the events after that one,
and the rest as it comes. The stream goes on meanwhile, for a bounded time and memory.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator

from sylvan.config.route import FailoverConfig
from sylvan.gateway.http.caller import Caller, HeaderPairs
from sylvan.gateway.http.endings import SSE
from sylvan.protocol.errors import RequestError

ASK_HEADER = "x-sylvan-event-ids"
LAST_HEADER = "last-event-id"
MAX_STREAMS = 4096
_ID = re.compile(r"([0-9a-f]{32})-([0-9]{1,12})\Z")
_END = b"\n\n"


class NumberedStream:
    """One stream: its events so far, and its reader.

    Attributes:
        name: First part of the ids.
        tenant: Whose it is.
        status: Of the answer; None: it has not begun.
        headers: Of the answer.
    """

    def __init__(self, tenant: str, max_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self.tenant = tenant
        self.status: int | None = None
        self.headers: HeaderPairs = ()
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._first = 0  # number of the oldest event that is kept
        self._num_bytes = 0
        self._partial = b""
        self._ended = False
        self._has_events = True
        self._changed = asyncio.Event()
        self.readers = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def begin(self, status: int, headers: HeaderPairs) -> None:
        """The answer has begun. Only events get ids; any other answer is kept as it is."""
        self.status = status
        self.headers = [p for p in headers if p[0] not in ("content-length", "x-request-id")]
        self._has_events = dict(headers).get("content-type", "").startswith(SSE)
        self._tell()

    async def begun(self) -> None:
        """Wait until the answer has begun, or will never."""
        while self.status is None and not self._ended:
            await self._changed.wait()

    def add(self, data: bytes) -> None:
        """More of the answer; events may be cut anywhere."""
        if not self._has_events:
            self._keep(data)
            self._tell()
            return
        *whole, self._partial = (self._partial + data).split(_END)
        for event in whole:
            number = self._first + len(self._events)
            self._keep(b"id: %s-%d\n" % (self.name.encode(), number) + event + _END)
        self._tell()

    def end(self) -> None:
        """The answer is complete, or nobody goes on with it."""
        if self._partial:
            self.add(_END)
        self._partial = b""
        self._ended = True
        self._tell()

    def check(self, after: int) -> None:
        """Whether a reader can go on after an event.

        Raises:
            RequestError: What follows it is not kept any more (410), or it has not come yet.
        """
        if after + 1 < self._first:
            message = "The events that follow are not kept any more."
            raise RequestError(message, param=LAST_HEADER, status=410)
        if after >= self._first + len(self._events):
            raise RequestError("There is no such event yet.", param=LAST_HEADER)

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Events after the one of that number, as they come, to the end.

        A reader so slow that what it needs is dropped gets no more.
        """
        place = after + 1
        while True:
            if place < self._first:
                return
            fresh = self._events[place - self._first :]
            if fresh:
                place += len(fresh)
                yield b"".join(fresh)
            elif self._ended:
                return
            else:
                changed = self._changed
                await changed.wait()

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._events.append(data)
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes and len(self._events) > 1:
            self._num_bytes -= len(self._events.pop(0))
            self._first += 1

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class NumberedStreams:
    """Streams that clients can come back to."""

    def __init__(self, config: FailoverConfig) -> None:
        self._config = config
        self._streams: dict[str, NumberedStream] = {}

    def wanted(self, caller: Caller) -> bool:
        """Whether a client asks for ids, and there is room for another stream."""
        asked = caller.headers.get(ASK_HEADER, "") == "1" and self._config.resume_s > 0
        return asked and len(self._streams) < MAX_STREAMS

    def open(self, tenant: str) -> NumberedStream:
        """A new stream; `forget_later` ends what is kept of it."""
        stream = NumberedStream(tenant, self._config.resume_bytes)
        self._streams[stream.name] = stream
        return stream

    def find(self, caller: Caller) -> tuple[NumberedStream, int] | None:
        """The stream that a client comes back to, and the last event that it has.

        Raises:
            RequestError: There is no such stream any more (410), or not for this client.
        """
        given = caller.headers.get(LAST_HEADER)
        if given is None:
            return None
        found = _ID.match(given)
        if found is None:
            raise RequestError(f"{LAST_HEADER}: {given[:80]!r} is no id.", param=LAST_HEADER)
        stream = self._streams.get(found[1])
        if stream is None or stream.tenant != caller.tenant:
            raise RequestError("There is no such stream.", param=LAST_HEADER, status=410)
        stream.check(int(found[2]))
        return stream, int(found[2])

    def forget_later(self, stream: NumberedStream) -> None:
        """Keep a stream for a while yet."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.resume_s, self._streams.pop, stream.name, None)
