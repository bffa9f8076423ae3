"""The answer to a client, assembled from what workers send."""

from __future__ import annotations

import asyncio

import msgspec

from sylvan.api.errors import Family
from sylvan.gateway.http.caller import (
    Caller,
    CallerGoneError,
    HeaderPairs,
    Refusal,
    end_to_end,
    refusal_of,
)
from sylvan.gateway.http.endings import NDJSON, SSE, error_tail
from sylvan.protocol.errors import CapacityError
from sylvan.protocol.journal import Totals
from sylvan.protocol.malformed import MALFORMED

WHOLE_BYTES = 1 << 20
"""Shorter answers are buffered and forwarded when complete, so that a worker that is lost while
sending one can still be replaced."""
_OURS = ("date", "server", "content-length", "x-request-id", "x-sylvan-journal")


class Answer:
    """Relays one answer. An answer that has not started can start over on another worker.

    Args:
        caller: The client.
        family: API whose error format is used.
        slow_s: A client that reads nothing for this long is disconnected.
    """

    def __init__(self, caller: Caller, family: Family, slow_s: float) -> None:
        self._caller = caller
        self._family = family
        self._slow_s = slow_s
        self._held: tuple[int, HeaderPairs] | None = None
        self._body = bytearray()
        self._media_type = ""

    @property
    def started(self) -> bool:
        """Whether the client has received any of it."""
        return self._caller.started

    async def head(self, status: int, headers: HeaderPairs) -> None:
        """Send the status and headers of a worker's answer."""
        found = dict(headers)
        self._media_type = found.get("content-type", "")
        length = found.get("content-length", "")
        kept = end_to_end(headers, _OURS)
        self._body.clear()
        self._held = None
        if not self._streams and length.isdigit() and int(length) <= WHOLE_BYTES:
            self._held = (status, kept)
        elif length.isdigit():
            await self._caller.start(status, [*kept, ("content-length", length)])
        else:
            await self._caller.start(status, kept)

    async def data(self, data: bytes) -> None:
        """Send a part of the body.

        Raises:
            CallerGoneError: The client stopped reading.
        """
        if self._held is not None:
            self._body += data
            return
        try:
            async with asyncio.timeout(self._slow_s):
                await self._caller.write(data)
        except TimeoutError:
            raise CallerGoneError from None

    async def end(self) -> None:
        """Finish the body."""
        if self._held is not None:
            status, headers = self._held
            await self._caller.reply(status, headers, bytes(self._body))
        else:
            await self._caller.write(b"", more=False)

    async def refuse(self, refusal: Refusal) -> None:
        """Send a worker's refusal as the answer."""
        kept = end_to_end(refusal.headers, _OURS)
        await self._caller.reply(refusal.status, kept, refusal.body)

    async def fail(self, error: CapacityError) -> None:
        """Send an error, or cut the answer off if it has started."""
        if not self.started:
            refusal = refusal_of(self._family, error)
            await self._caller.reply(refusal.status, refusal.headers, refusal.body)
            return
        tail = error_tail(self._family, self._media_type, error)
        if tail is None:
            raise CallerGoneError  # the only thing left is to close the connection
        await self._caller.write(tail)
        await self._caller.write(b"", more=False)

    def totals(self) -> Totals:
        """Return the token counts in the answer, if it was not a stream."""
        return usage_in(bytes(self._body)) if self._held is not None else Totals()

    @property
    def _streams(self) -> bool:
        return self._media_type.partition(";")[0].strip().lower() in (SSE, NDJSON)


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None
    meta_info: _Usage | None = None


def usage_in(body: bytes) -> Totals:
    """Read the token counts from a whole answer of any API family; zero if it has none."""
    if b"_tokens" not in body:
        return Totals()
    try:
        if body.lstrip()[:1] == b"[":
            many = msgspec.json.decode(body, type=list[_Counted])
        else:
            many = [msgspec.json.decode(body, type=_Counted)]
    except MALFORMED:
        return Totals()
    usages = [one.usage or one.meta_info for one in many]
    counted = [usage for usage in usages if usage is not None]
    return Totals(
        prompt_tokens=sum(u.prompt_tokens or u.input_tokens for u in counted),
        completion_tokens=sum(u.completion_tokens or u.output_tokens for u in counted),
        cached_tokens=sum(
            (u.prompt_tokens_details.cached_tokens or 0) if u.prompt_tokens_details else 0
            for u in counted
        ),
    )
