"""The client's side of one request: its body, its answer, and its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from sylvan.api.content_coding import decompress
from sylvan.api.errors import Family, error_body
from sylvan.gateway.observe.spans import NoSpan, TraceSpan
from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.utils.body_memory import BodyMemory

HeaderPairs = Sequence[tuple[str, str]]

_JSON = ("content-type", "application/json")


class CallerGoneError(Exception):
    """The client disconnected."""


class Caller:
    """One incoming request.

    Attributes:
        method: HTTP method.
        path: Path without the query.
        query: The query string.
        headers: Headers by lower-case name; of repeated headers, the last.
        request_id: Request ID, sent to the client and to workers.
        tenant: Tenant of the request.
        started: The status was sent and can no longer change.
        status: Status of the answer.
        gone: The client disconnected.
        span: Trace span of the request.
        held: Bytes of the body held in memory.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, body_memory: BodyMemory | None = None
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.raw_headers: HeaderPairs = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        self.headers: Mapping[str, str] = dict(self.raw_headers)
        self.request_id = ""
        self.tenant = ""
        self.started = False
        self.status = 500
        self.gone = False
        self.span: TraceSpan = NoSpan()
        self.held = 0
        self._memory = body_memory
        self._receive = receive
        self._send = send

    def for_call(self, method: str, path: str) -> Caller:
        """Copy the request with another path and body, for a call whose answer is dropped."""
        scope = {
            "method": method,
            "path": path,
            "headers": [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in self.raw_headers
                if name not in ("content-length", "content-type")
            ],
        }
        other = Caller(scope, self._receive, _discard)
        other.tenant, other.request_id = self.tenant, self.request_id
        other.span = self.span
        return other

    def recorded(self, send: Send) -> Caller:
        """Copy the request with `send` as its sink, for work that outlives the client."""
        scope = {
            "method": self.method,
            "path": self.path,
            "query_string": self.query.encode("latin-1"),
            "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in self.raw_headers],
        }
        other = Caller(scope, _never_disconnects, send)
        other.tenant, other.request_id = self.tenant, self.request_id
        other.span = self.span
        return other

    async def body(self, max_bytes: int) -> bytes:
        """Read the whole body, and decompress it so that workers need not.

        Raises:
            RequestError: The body is too large (413), as soon as its length or header shows that,
                or does not match its `content-encoding`.
            CapacityError: The bodies of all calls use too much memory.
            CallerGoneError: The client disconnected before its end.
        """
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            self._hold(len(part))
            parts.append(part)
            more = message.get("more_body", False)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        coding = self.headers.get("content-encoding")
        if not coding:
            return data
        plain = decompress(data, coding, max_bytes)
        if len(plain) > max_bytes:
            raise _too_large(max_bytes)
        self._hold(len(plain))
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != "content-encoding"]
        self.headers = dict(self.raw_headers)
        return plain

    def _hold(self, num_bytes: int) -> None:
        if self._memory is not None:
            self._memory.take(num_bytes)
            self.held += num_bytes

    async def start(self, status: int, headers: HeaderPairs) -> None:
        """Send status and headers."""
        self.started, self.status = True, status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        if self.request_id:
            raw.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client reads slowly."""
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def reply(self, status: int, headers: HeaderPairs, data: bytes) -> None:
        """Send a whole answer."""
        length = ("content-length", str(len(data)))
        kept = [pair for pair in headers if pair[0] != "content-length"]
        await self.start(status, [*kept, length])
        await self.write(data, more=False)

    async def reply_json(self, content: Any, status: int = 200, *headers: tuple[str, str]) -> None:
        """Send a whole JSON answer."""
        await self.reply(status, [_JSON, *headers], orjson.dumps(content))

    async def reply_error(self, family: Family, error: SylvanError) -> None:
        """Send an error in the format of the route's API."""
        refusal = refusal_of(family, error)
        await self.reply(refusal.status, refusal.headers, refusal.body)

    async def until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and cancel it if the client disconnects first. The body must have been read.

        Raises:
            CallerGoneError: The client disconnected.
        """
        task = asyncio.current_task()
        assert task is not None, "called outside of a task"

        def left(watch: asyncio.Task[None]) -> None:
            if not watch.cancelled():
                self.gone = True
                task.cancel()

        watch = asyncio.create_task(self._left())
        watch.add_done_callback(left)
        try:
            await work
        except asyncio.CancelledError:
            if not self.gone:
                raise
            task.uncancel()
            raise CallerGoneError from None
        finally:
            watch.remove_done_callback(left)
            watch.cancel()

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _never_disconnects() -> Message:
    """Wait forever: this client never disconnects."""
    await asyncio.Event().wait()
    raise AssertionError("never set")


async def _discard(message: Message) -> None:
    """Drop a message that has no reader."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A complete error answer."""

    status: int
    headers: HeaderPairs
    body: bytes


def refusal_of(family: Family, error: SylvanError) -> Refusal:
    """Format an error as the route's API does."""
    status, param = 500, None
    headers: list[tuple[str, str]] = [_JSON]
    if isinstance(error, RequestError):
        status, param = error.status, error.param
        if status == 401:
            headers.append(("www-authenticate", "Bearer"))
    elif isinstance(error, CapacityError):
        status = error.status
        if status in (408, 429, 503):
            headers.append(("retry-after", str(max(1, round(error.retry_after_s)))))
    code = getattr(error, "code", None)
    content = error_body(family, status, str(error), param=param, code=code)
    return Refusal(status, headers, orjson.dumps(content))


_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def end_to_end(headers: HeaderPairs, drop: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the headers that a proxy forwards: no hop-by-hop headers, none of `drop`."""
    dropped = {*_HOP_BY_HOP, *drop}
    for name, value in headers:
        if name == "connection":
            dropped.update(part.strip().lower() for part in value.split(","))
    return [(name, value) for name, value in headers if name not in dropped]


def _too_large(max_bytes: int) -> RequestError:
    message = f"The body is larger than {max_bytes / 2**20:g} MiB, the limit of this gateway."
    return RequestError(message, status=413)
