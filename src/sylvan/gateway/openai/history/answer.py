"""Relays a response to the client under the gateway's ID, and stores it."""

from __future__ import annotations

import re
from typing import Any, cast

import orjson

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import HeaderPairs
from sylvan.gateway.http.endings import SSE
from sylvan.gateway.openai.history.store import Item
from sylvan.gateway.openai.history.turn import StoredTurn, is_response
from sylvan.protocol.journal import Totals

MAX_BYTES = 64 << 20
"""Size limit of an answer, or of one stream event."""
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_BLANK_BYTES = 4
_OURS = ("content-length",)


class StoredAnswer:
    """An `Answer` whose response is stored.

    Whole answers are relayed once complete. Stream events without a response are relayed unchanged.

    Args:
        turn: The request and its history.
        answer: The answer to the client.
    """

    def __init__(self, turn: StoredTurn, answer: Answer) -> None:
        self._turn = turn
        self._answer = answer
        self._streams = False
        self._whole: tuple[int, HeaderPairs] | None = None
        self._buffer = bytearray()

    @property
    def started(self) -> bool:
        return self._answer.started

    async def head(self, status: int, headers: HeaderPairs) -> None:
        self._buffer.clear()
        kind = dict(headers).get("content-type", "").partition(";")[0].strip().lower()
        self._streams = status == 200 and kind == SSE
        kept = [pair for pair in headers if pair[0] not in _OURS]
        self._whole = None if self._streams else (status, kept)
        if self._streams:
            await self._answer.head(status, kept)

    async def data(self, data: bytes) -> None:
        """See `Answer.data`.

        Raises:
            UpstreamError: The answer, or one event, is too large.
        """
        before = len(self._buffer)
        self._buffer += data
        if self._streams:
            await self._pass_events(max(0, before - _BLANK_BYTES))
        if len(self._buffer) > MAX_BYTES:
            message = f"The upstream's answer is larger than {MAX_BYTES >> 20} MiB."
            raise UpstreamError(message, kind="protocol")

    async def end(self) -> None:
        if self._whole is None:
            if self._buffer:
                await self._answer.data(await self._event(bytes(self._buffer)))
            await self._answer.end()
            return
        status, headers = self._whole
        body = bytes(self._buffer)
        reply = _decoded(body)
        if status == 200 and is_response(reply):
            body = orjson.dumps(await self._turn.keep(reply))
        await self._answer.head(status, [*headers, ("content-length", str(len(body)))])
        await self._answer.data(body)
        await self._answer.end()

    def totals(self) -> Totals:
        return self._answer.totals()

    async def _pass_events(self, start: int) -> None:
        """Relay the complete events; no event ends before `start`."""
        ends = [found.end() for found in _BLANK_LINE.finditer(bytes(self._buffer[start:]))]
        if not ends:
            return
        done, passed = 0, bytearray()
        for end in ends:
            passed += await self._event(bytes(self._buffer[done : start + end]))
            done = start + end
        del self._buffer[:done]
        await self._answer.data(bytes(passed))

    async def _event(self, block: bytes) -> bytes:
        """Return an event with the blank line after it."""
        if b'"response"' not in block:
            return block
        lines = block.splitlines()
        data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
        event = _decoded(data)
        inside: Any = event.get("response")
        if not is_response(inside):
            return block
        reply = cast("Item", inside)
        if event.get("type") in _ENDS:
            event["response"] = await self._turn.keep(reply)
        else:
            event["response"] = self._turn.shown(reply)
        others = [line for line in lines if line and not line.startswith(b"data:")]
        return b"\n".join([*others, b"data: " + orjson.dumps(event), b"", b""])


def _decoded(data: bytes) -> Item:
    """Decode a JSON object; return an empty one if it is none."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return cast("Item", found) if isinstance(found, dict) else {}
