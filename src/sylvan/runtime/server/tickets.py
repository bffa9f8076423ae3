"""Serves gateways that send a ticket and get frames. See `sylvan.protocol.journal`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import (
    BEAT_S,
    JOURNAL_HEADER,
    KEY_HEADER,
    MEDIA_TYPE,
    PROBE,
    RESUME_HEADER,
    TICKET_HEADER,
    FrameKind,
    JournalError,
    JournalFrame,
    JournalTicket,
    ResponseHead,
    ResumeFrom,
)
from sylvan.runtime.server.endpoint import json_response
from sylvan.runtime.server.security import CallRefusal, Gate, Level
from sylvan.runtime.server.settings import CurrentSettings, ServerSettings
from sylvan.runtime.serving.journal import JOURNAL_KEY, Journal

logger = logging.getLogger(__name__)

_TICKET = TICKET_HEADER.encode()


class Tickets:
    """Serves calls with a ticket in frames, and passes all others through.

    Args:
        app: The wrapped application.
        settings: Decides who is a gateway: the holder of the gateway key if there is one, else any
            operator.
        gate: Authenticates.
        alive: Whether the engine makes progress; if not, no heartbeat frames are sent.
    """

    def __init__(
        self, app: ASGIApp, settings: CurrentSettings, gate: Gate, alive: Callable[[], bool]
    ) -> None:
        self._app = app
        self._settings = settings
        self._gate = gate
        self._alive = alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        if scope["type"] != "http" or not _has_ticket(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        text = headers[TICKET_HEADER]
        trusted = trusts_gateway(self._settings.now, self._gate, headers)
        if text == PROBE:
            await self._app(scope, receive, _with_journal_header(send, trusted))
        elif trusted:
            await self._serve(scope, receive, send)
        else:
            message = f"{TICKET_HEADER} is for gateways, and this server does not know you as one."
            await _refuse(scope, receive, send, RequestError(message, status=403))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            ticket = JournalTicket.from_header(headers[TICKET_HEADER])
            resume, receive = await self._read_resume(headers, receive)
            journal = Journal(ticket, resume)
        except (JournalError, RequestError) as error:
            refusal = RequestError(str(error), param=TICKET_HEADER)
            await _refuse(scope, receive, send, refusal)
            return
        framed = _Framed(send, journal)
        await framed.open()
        beating = asyncio.create_task(framed.beat(self._alive))
        try:
            await self._app({**scope, JOURNAL_KEY: journal}, receive, framed.send)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        await framed.close()

    async def _read_resume(
        self, headers: Headers, receive: Receive
    ) -> tuple[ResumeFrom | None, Receive]:
        """Read the journal so far, and return how to receive what follows it."""
        given = headers.get(RESUME_HEADER)
        if given is None:
            return None, receive
        if not given.isdigit() or len(given) > 12:
            raise JournalError(f"{RESUME_HEADER} must be a number of bytes")
        size, limit = int(given), self._settings.now.server.max_body_bytes
        if size > limit:
            raise JournalError(f"the journal has {size} bytes; at most {limit} are taken")
        data, more = bytearray(), True
        while len(data) < size and more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        if len(data) < size:
            raise JournalError("the journal is cut short")
        rest = {"type": "http.request", "body": bytes(data[size:]), "more_body": more}
        return ResumeFrom.decode(bytes(data[:size])), _first(rest, receive)


def trusts_gateway(settings: ServerSettings, gate: Gate, headers: Headers) -> bool:
    """Whether a call comes from a gateway: see `Tickets`."""
    key = settings.server.gateway_key
    if key is not None:
        return key.matches(headers.get(KEY_HEADER, ""))
    return not isinstance(gate.check(Level.ADMIN_OPTIONAL, headers), CallRefusal)


class _Framed:
    """Turns the messages of an answer into frames."""

    def __init__(self, send: Send, journal: Journal) -> None:
        self._send = send
        self._journal = journal
        self._lock = asyncio.Lock()
        self._ended = False

    async def open(self) -> None:
        """Start the framed answer, before its status is known."""
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (JOURNAL_HEADER.encode(), b"1"),
            (b"cache-control", b"no-cache"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start":
            pairs = tuple(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message.get("headers", ())
            )
            head = msgspec.msgpack.encode(ResponseHead(message["status"], pairs))
            await self._put(JournalFrame(FrameKind.HEAD, head))
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            self._ended = not message.get("more_body", False)
            if body and self._journal.is_new():
                await self._put(JournalFrame(FrameKind.DATA, body, self._journal.take()))

    async def beat(self, alive: Callable[[], bool]) -> None:
        """Send a heartbeat frame."""
        while True:
            await asyncio.sleep(BEAT_S)
            if alive():
                await self._put(JournalFrame(FrameKind.BEAT))

    async def close(self) -> None:
        """End the answer; without an END frame if it is incomplete."""
        if self._ended:
            totals = msgspec.msgpack.encode(self._journal.totals())
            await self._put(JournalFrame(FrameKind.END, totals))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, frame: JournalFrame) -> None:
        async with self._lock:
            body = frame.encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


def _has_ticket(scope: Scope) -> bool:
    return _TICKET in [key for key, _ in scope["headers"]]


def _with_journal_header(send: Send, trusted: bool) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[JOURNAL_HEADER] = "1" if trusted else "0"
        await send(message)

    return send_with_header


def _first(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that yields `message` first."""
    pending = [message]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received


async def _refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    content = {"error": {"message": str(error), "param": error.param, "code": error.status}}
    response = json_response(content, status=error.status, headers={JOURNAL_HEADER: "0"})
    await response(scope, receive, send)
