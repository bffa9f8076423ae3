"""Relays one worker's answer to the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from typing import Protocol

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.flow.retry import RETRYABLE
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import Refusal
from sylvan.gateway.http.outgoing import AnswerJournal
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.upstream.http import Incoming
from sylvan.gateway.workers.worker import Dispatch
from sylvan.protocol.journal import (
    FrameKind,
    FrameReader,
    JournalError,
    JournalFrame,
    ResponseHead,
    Totals,
    read_head,
    read_totals,
)

MAX_REFUSAL_BYTES = 1 << 20


class RetryableStatusError(UpstreamError):
    """A worker answered with a status after which another worker may be tried.

    Attributes:
        refusal: Its answer, sent to the client if no other worker can help.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"The worker answered with status {refusal.status}.", kind="status", status=502
        )
        self.refusal = refusal

    @property
    def is_overload(self) -> bool:
        """Whether the worker is overloaded rather than broken."""
        names = {name for name, _ in self.refusal.headers}
        status = self.refusal.status
        return status in (408, 429) or (status == 503 and "retry-after" in names)


class AnswerReceiver(Protocol):
    """Reads one worker's answer."""

    async def plain(self, incoming: Incoming) -> None:
        """Read an unframed answer."""
        ...

    async def frames(self, incoming: Incoming, journal: AnswerJournal, stall_s: float) -> None:
        """Read a framed answer with journal entries."""
        ...


class EventFilter(Protocol):
    """Edits the events of a stream as they pass."""

    def events(self, chunk: bytes) -> bytes:
        """Edit a part of the stream; return the complete events."""
        ...

    def end(self) -> bytes:
        """Return what follows the last complete event."""
        ...


class Relay:
    """Relays what one worker sends.

    Attributes:
        edits: Edits the stream; set at the latest by the awaitable `before`.
        totals: Token counts of the request, once the answer is complete.
        progressed: The worker sent something for the client.
    """

    def __init__(
        self,
        answer: Answer,
        dispatch: Dispatch,
        meter: RequestMeter,
        refusals: AbstractSet[int] = RETRYABLE,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Relay one attempt.

        Args:
            answer: The answer to the client.
            dispatch: Dispatch to the worker.
            meter: Notified of the first byte.
            refusals: Statuses after which another worker may be tried.
            before: Awaited before the client sees any of an answer with a status below 300.
        """
        self._refusals = refusals
        self._before = before
        self._answer = answer
        self._dispatch = dispatch
        self._meter = meter
        self.edits: EventFilter | None = None
        self.totals = Totals()
        self.progressed = False

    async def plain(self, incoming: Incoming) -> None:
        """Relay an unframed answer.

        Raises:
            UpstreamError: The answer was cut off.
            RefusedError: The worker rejected the request, and the client has seen nothing.
        """
        self._meter.answered(incoming.status)
        if incoming.status in self._refusals and not self._answer.started:
            body = await incoming.read(MAX_REFUSAL_BYTES)
            raise RetryableStatusError(Refusal(incoming.status, incoming.headers, body))
        await self._ready(incoming.status)
        await self._answer.head(incoming.status, incoming.headers)
        async for chunk in incoming.chunks():
            self._first_byte()
            await self._answer.data(self._edited(chunk))
            self.progressed = True
        if self.edits is not None:
            await self._answer.data(self.edits.end())
        self.totals = self._answer.totals()
        await self._answer.end()

    async def frames(self, incoming: Incoming, journal: AnswerJournal, stall_s: float) -> None:
        """Relay the contents of frames, and record what another worker needs to continue.

        Raises:
            UpstreamError: The answer was cut off or stalled.
            RefusedError: The worker rejected the request, and the client has seen nothing.
        """
        reader = FrameReader()
        refused: ResponseHead | None = None
        reason = bytearray()
        try:
            async for chunk in incoming.chunks(stall_s):
                for frame in reader.feed(chunk):
                    if frame.kind is FrameKind.HEAD:
                        refused = await self._head(read_head(frame), journal)
                    elif frame.kind is FrameKind.DATA and refused is not None:
                        reason += frame.body
                    elif frame.kind is FrameKind.DATA:
                        await self._data(frame, journal)
                    elif frame.kind is FrameKind.END:
                        await self._end(frame, refused, bytes(reason))
                        return
        except JournalError as error:
            message = f"The worker does not keep to the protocol: {error}."
            raise UpstreamError(message, kind="protocol") from error
        raise UpstreamError("The worker's answer was cut off.", kind="closed")

    async def _head(self, head: ResponseHead, journal: AnswerJournal) -> ResponseHead | None:
        """Relay the head, or return it if it is a retryable refusal."""
        self._meter.answered(head.status)
        if journal.begun:
            return None if head.status == 200 else head
        if head.status in self._refusals and not self._answer.started:
            return head
        await self._ready(head.status)
        await self._answer.head(head.status, head.headers)
        journal.begun = self._answer.started
        return None

    async def _data(self, frame: JournalFrame, journal: AnswerJournal) -> None:
        self._first_byte()
        await self._answer.data(self._edited(frame.body))
        self.progressed = True
        if self._answer.started:
            journal.add(frame.entries)

    async def _end(self, frame: JournalFrame, refused: ResponseHead | None, reason: bytes) -> None:
        if refused is not None:
            raise RetryableStatusError(Refusal(refused.status, refused.headers, reason))
        self.totals = read_totals(frame)
        if self.edits is not None:
            await self._answer.data(self.edits.end())
        await self._answer.end()

    def _edited(self, data: bytes) -> bytes:
        return data if self.edits is None else self.edits.events(data)

    async def _ready(self, status: int) -> None:
        if self._before is not None and status < 300:
            await self._before()

    def _first_byte(self) -> None:
        self._dispatch.answered()
        self._meter.first_byte()
