"""A worker's answer that the gateway reads itself instead of relaying it."""

from __future__ import annotations

from collections.abc import Callable

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.http.caller import HeaderPairs, Refusal
from sylvan.gateway.http.outgoing import AnswerJournal
from sylvan.gateway.http.relay import RetryableStatusError
from sylvan.gateway.upstream.http import Incoming
from sylvan.gateway.workers.worker import Dispatch
from sylvan.protocol.journal import FrameKind, FrameReader, JournalError, read_head


class WorkerReply:
    """Reads one worker's answer.

    Args:
        dispatch: Dispatch to the worker.
        max_bytes: Limit of the answer.
        keeps: False: drop what exceeds `max_bytes` instead of failing.
        taken: Called when the worker accepts the request.

    Attributes:
        status: Status of the answer.
        headers: Headers of the answer.
        body: The body so far.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        max_bytes: int,
        *,
        keeps: bool,
        taken: Callable[[], None] | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._taken = taken
        self._max_bytes = max_bytes
        self._keeps = keeps
        self.status = 0
        self.headers: HeaderPairs = ()
        self.body = bytearray()

    async def plain(self, incoming: Incoming) -> None:
        """Read an unframed answer.

        Raises:
            UpstreamError: The answer was cut off, or is too large.
            RefusedError: The worker rejected the request.
        """
        self._head(incoming.status, incoming.headers)
        async for chunk in incoming.chunks():
            self._add(chunk)
        self._end()

    async def frames(self, incoming: Incoming, journal: AnswerJournal, stall_s: float) -> None:
        """Read the contents of frames; drop journal entries.

        Raises:
            UpstreamError: The answer was cut off, is too large, or stalled.
            RefusedError: The worker rejected the request.
        """
        reader = FrameReader()
        try:
            async for chunk in incoming.chunks(stall_s):
                for frame in reader.feed(chunk):
                    if frame.kind is FrameKind.HEAD:
                        head = read_head(frame)
                        self._head(head.status, head.headers)
                    elif frame.kind is FrameKind.DATA:
                        self._add(frame.body)
                    elif frame.kind is FrameKind.END:
                        self._end()
                        return
        except JournalError as error:
            message = f"The worker does not keep to the protocol: {error}."
            raise UpstreamError(message, kind="protocol") from error
        raise UpstreamError("The worker's answer was cut off.", kind="closed")

    def _head(self, status: int, headers: HeaderPairs) -> None:
        self.status, self.headers = status, headers
        if status < 300 and self._taken is not None:
            self._taken()

    def _add(self, data: bytes) -> None:
        self._dispatch.answered()
        if len(self.body) + len(data) <= self._max_bytes:
            self.body += data
        elif self._keeps:
            raise UpstreamError("The worker's answer is too large.", kind="protocol")

    def _end(self) -> None:
        if self.status >= 300:
            raise RetryableStatusError(Refusal(self.status, self.headers, bytes(self.body)))
