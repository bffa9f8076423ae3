"""Passes one worker's answer on."""

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
    """A worker answered with a status after which another one may be tried.

    Attributes:
        refusal: Its answer, for the client if nobody else helps.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"The worker answered with status {refusal.status}.", kind="status", status=502
        )
        self.refusal = refusal

    @property
    def is_overload(self) -> bool:
        """Whether the worker is too busy rather than broken."""
        names = {name for name, _ in self.refusal.headers}
        status = self.refusal.status
        return status in (408, 429) or (status == 503 and "retry-after" in names)


class AnswerReceiver(Protocol):
    """Takes one worker's answer."""

    async def plain(self, incoming: Incoming) -> None:
        """It comes as the client is to get it."""
        ...

    async def frames(self, incoming: Incoming, journal: AnswerJournal, stall_s: float) -> None:
        """It comes in frames, with the entries of a journal."""
        ...


class EventFilter(Protocol):
    """Changes the events of a stream on their way."""

    def events(self, chunk: bytes) -> bytes:
        """A part of the stream; gives whole events."""
        ...

    def end(self) -> bytes:
        """What came after the last whole event."""
        ...


class Relay:
    """Passes on what one worker sends.

    Attributes:
        edits: Changes a stream on its way; set at the latest by what is awaited `before`.
        totals: Tokens of the request, once the answer is complete.
        progressed: The worker gave something for the client.
    """

    def __init__(
        self,
        answer: Answer,
        dispatch: Dispatch,
        meter: RequestMeter,
        refusals: AbstractSet[int] = RETRYABLE,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Make one for one attempt.

        Args:
            answer: What the client gets.
            dispatch: Of the worker.
            meter: Told when something comes.
            refusals: Statuses after which another worker may be tried.
            before: Awaited before the client sees anything of an answer with a status below 300.
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
        """Pass on an answer as it comes.

        Raises:
            UpstreamError: It broke off.
            RefusedError: The worker refused, and the client has seen nothing.
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
        """Pass on the contents of frames, and keep what is needed to go on elsewhere.

        Raises:
            UpstreamError: They broke off, or nothing came for too long.
            RefusedError: The worker refused, and the client has seen nothing of its answer.
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
        raise UpstreamError("The worker broke off its answer.", kind="closed")

    async def _head(self, head: ResponseHead, journal: AnswerJournal) -> ResponseHead | None:
        """Pass the head on, or return it if it is a refusal."""
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
