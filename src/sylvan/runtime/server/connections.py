"""Limits connections before authentication: their number, size and idle time."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sylvan.config.tree import LimitsConfig

log = logging.getLogger(__name__)

SPARE_FILES = 128  # descriptors reserved for everything else
MIN_BODY_RATE = 4096  # bytes that extend a body's timeout by one second
_PHRASES = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        total: Open connections.
        per_address: Open connections per client address.
        head_bytes: Size of the request line and headers.
        head_s: Seconds until they must have arrived.
        body_s: Seconds until a body must have arrived, extended by its size.
        write_s: Seconds that a client may read nothing of an answer.
    """

    total: int
    per_address: int
    head_bytes: int
    head_s: float
    body_s: float
    write_s: float

    @classmethod
    def from_config(cls, limits: LimitsConfig) -> ConnectionLimits:
        """Read the limits from the configuration, capped by the process's file descriptors."""
        asked = cls(
            total=limits.connections,
            per_address=limits.connections_per_address,
            head_bytes=limits.head_bytes,
            head_s=limits.head_s,
            body_s=limits.body_s,
            write_s=limits.write_s,
        )
        return asked.within_files()

    def within_files(self) -> ConnectionLimits:
        """Cap the number of connections by the process's file descriptors."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = self.total
        if files != resource.RLIM_INFINITY:
            room = min(room, max(files - SPARE_FILES, files // 2))
        return replace(self, total=room, per_address=min(self.per_address, room))


class Connections:
    """The open connections.

    Attributes:
        limits: The limits.
        refused: Number of rejected or closed connections, by reason.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._open: dict[BoundedProtocol, None] = {}  # oldest first
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: BoundedProtocol, address: str) -> bool:
        """Register a connection, closing an idle one if needed; False if there is no room."""
        if self._addresses[address] >= self.limits.per_address:
            self.refused["address"] += 1
            return False
        if len(self._open) >= self.limits.total and not self._end_idle():
            self.refused["total"] += 1
            return False
        self._open[connection] = None
        self._addresses[address] += 1
        return True

    def leave(self, connection: BoundedProtocol, address: str) -> None:
        """Unregister a connection."""
        if connection in self._open:
            del self._open[connection]
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def _end_idle(self) -> bool:
        """Close the oldest idle connection."""
        idle = next((connection for connection in self._open if connection.idle), None)
        if idle is None:
            return False
        self.refused["idle"] += 1
        idle.end()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection: uvicorn's protocol, with limits enforced.

    Args:
        connections: The registry of connections.
        facts: Arguments of uvicorn's protocol.
    """

    def __init__(self, connections: Connections, **facts: Any) -> None:
        super().__init__(**facts)
        self._connections = connections
        self._limits = connections.limits
        self._address = ""
        self._head_bytes = 0  # bytes received before the head was complete
        self._parsed = 0  # deadline of the head
        self._in_head = True
        self._heads = 0  # complete requests
        self._body_bytes = 0
        self._body_began_s = 0.0
        self._refusal: tuple[int, str] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no complete request awaits an answer."""
        return self._in_head and (self.cycle is None or self.cycle.response_complete)

    def end(self) -> None:
        """Close the connection now."""
        self._connections.leave(self, self._address)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._connections.admit(self, self._address):
            self._watch_head()
        else:
            self._refuse(503, "Too many connections; try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self, self._address)
        self._unwatch()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        heads = self._heads
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._heads == heads and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes:
                self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or a request that was rejected while parsing."""
        if self._refusal is None:
            super().send_400_response(msg)
        else:
            self._refuse(*self._refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._watch_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heads += 1
        self._head_bytes = self._parsed = 0
        self._body_bytes, self._body_began_s = 0, self.loop.time()
        self._watch_in(self._limits.body_s, self._check_body)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unwatch()
        self._in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.write_s, self._stalled)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _count(self, num_bytes: int) -> None:
        self._parsed += num_bytes
        if self._parsed > self._limits.head_bytes:
            self._refusal = (431, self._too_large())
            raise ValueError(self._refusal[1])  # stops the parser

    def _watch_head(self) -> None:
        self._watch_in(self._limits.head_s, self._late_head)

    def _watch_in(self, seconds: float, check: Any) -> None:
        self._unwatch()
        self._watch = self.loop.call_later(seconds, check)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _late_head(self) -> None:
        self._connections.refused["head"] += 1
        limit = f"{self._limits.head_s:g} s (limits.head_s)"
        self._refuse(408, f"The request line and headers took more than {limit}.")

    def _check_body(self) -> None:
        allowed_s = self._limits.body_s + self._body_bytes / MIN_BODY_RATE
        left_s = self._body_began_s + allowed_s - self.loop.time()
        if self.flow.read_paused or left_s > 0:  # reading is paused: the client cannot send
            self._watch_in(max(left_s, 1.0), self._check_body)
            return
        self._connections.refused["body"] += 1
        self._refuse(408, f"The body came too slowly (limits.body_s, {MIN_BODY_RATE} bytes/s).")

    def _stalled(self) -> None:
        self._connections.refused["write"] += 1
        self.end()

    def _refuse_head(self) -> None:
        self._refuse(431, self._too_large())

    def _too_large(self) -> str:
        limit = self._limits.head_bytes
        return f"Request line and headers are over {limit} bytes (limits.head_bytes)."

    def _refuse(self, status: int, message: str) -> None:
        if status == 431:
            self._connections.refused["head size"] += 1
        self._unwatch()
        started = self.cycle is not None and (
            self.cycle.response_started and not self.cycle.response_complete
        )
        if not started and not self.transport.is_closing():
            text = message.encode()
            head = (
                f"HTTP/1.1 {status} {_PHRASES[status]}\r\n"
                "content-type: text/plain; charset=utf-8\r\n"
                f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + text)
        self.transport.close()
