"""Streams with event IDs, so that a client can reconnect and continue.

A client asks for IDs with the header `x-sylvan-event-ids: 1`. Each event then starts with a line
`id: STREAM-NUMBER`. A client that reconnects with `Last-Event-ID` gets the events after that one,
then the rest as it arrives. Meanwhile the stream runs on, within limits of time and memory.
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
    """One stream: its recent events, and its reader.

    Attributes:
        name: First part of its event IDs.
        tenant: Tenant of the request.
        status: Status of the answer; None: not started.
        headers: Headers of the answer.
    """

    def __init__(self, tenant: str, max_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self.tenant = tenant
        self.status: int | None = None
        self.headers: HeaderPairs = ()
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._first = 0  # number of the oldest event in the buffer
        self._num_bytes = 0
        self._partial = b""
        self._ended = False
        self._has_events = True
        self._changed = asyncio.Event()
        self.readers = 0

    @property
    def ended(self) -> bool:
        """Whether the stream is complete."""
        return self._ended

    def begin(self, status: int, headers: HeaderPairs) -> None:
        """Record status and headers. Only event streams get IDs; other answers pass unchanged."""
        self.status = status
        self.headers = [p for p in headers if p[0] not in ("content-length", "x-request-id")]
        self._has_events = dict(headers).get("content-type", "").startswith(SSE)
        self._notify()

    async def begun(self) -> None:
        """Wait until the answer starts, or can no longer start."""
        while self.status is None and not self._ended:
            await self._changed.wait()

    def add(self, data: bytes) -> None:
        """Append a part of the answer; it may end inside an event."""
        if not self._has_events:
            self._keep(data)
            self._notify()
            return
        *whole, self._partial = (self._partial + data).split(_END)
        for event in whole:
            number = self._first + len(self._events)
            self._keep(b"id: %s-%d\n" % (self.name.encode(), number) + event + _END)
        self._notify()

    def end(self) -> None:
        """Mark the answer as complete or abandoned."""
        if self._partial:
            self.add(_END)
        self._partial = b""
        self._ended = True
        self._notify()

    def check(self, after: int) -> None:
        """Check that a reader can continue after an event.

        Raises:
            RequestError: The next event was dropped (410), or that event was not sent yet.
        """
        if after + 1 < self._first:
            message = "The events after this one are no longer stored; send the request again."
            raise RequestError(message, param=LAST_HEADER, status=410)
        if after >= self._first + len(self._events):
            raise RequestError("There is no event with this number yet.", param=LAST_HEADER)

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after that number until the stream ends.

        Stops early if the reader is so slow that its next event was dropped.
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

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class NumberedStreams:
    """The streams to which clients can reconnect."""

    def __init__(self, config: FailoverConfig) -> None:
        self._config = config
        self._streams: dict[str, NumberedStream] = {}

    def wanted(self, caller: Caller) -> bool:
        """Whether a client asks for event IDs and there is room for another stream."""
        requested = caller.headers.get(ASK_HEADER, "") == "1" and self._config.resume_s > 0
        return requested and len(self._streams) < MAX_STREAMS

    def open(self, tenant: str) -> NumberedStream:
        """Create a stream; `forget_later` schedules its removal."""
        stream = NumberedStream(tenant, self._config.resume_bytes)
        self._streams[stream.name] = stream
        return stream

    def find(self, caller: Caller) -> tuple[NumberedStream, int] | None:
        """Return the stream that a client reconnects to, and its last event.

        Raises:
            RequestError: The stream is gone (410), or belongs to another tenant.
        """
        given = caller.headers.get(LAST_HEADER)
        if given is None:
            return None
        found = _ID.match(given)
        if found is None:
            message = f"{LAST_HEADER}: {given[:80]!r} is not an event ID of this gateway."
            raise RequestError(message, param=LAST_HEADER)
        stream = self._streams.get(found[1])
        if stream is None or stream.tenant != caller.tenant:
            raise RequestError("There is no such stream.", param=LAST_HEADER, status=410)
        stream.check(int(found[2]))
        return stream, int(found[2])

    def forget_later(self, stream: NumberedStream) -> None:
        """Keep a stream for a while, then remove it."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.resume_s, self._streams.pop, stream.name, None)
