"""Responses in background mode: generated while no client is connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
from starlette.types import Message

from sylvan.api.errors import Family
from sylvan.gateway.http.caller import Caller, refusal_of
from sylvan.gateway.openai.history.store import HistoryStore, Item
from sylvan.gateway.openai.history.turn import StoredTurn
from sylvan.protocol.errors import CapacityError, SylvanError
from sylvan.utils.clock import Clock
from sylvan.utils.tasks import settled

log = logging.getLogger(__name__)

Work = Callable[[Caller], Awaitable[None]]
"""Serves a request."""


class Background:
    """Generates responses in the background; belongs to one event loop.

    Args:
        store: Where clients read them.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    def __init__(self, store: HistoryStore, wall: Clock) -> None:
        self._store = store
        self._wall = wall
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def start(self, caller: Caller, turn: StoredTurn, work: Work) -> Item:
        """Start a response; return its initial form.

        Raises:
            CapacityError: The response cannot be stored now.
        """
        reply = turn.shown(
            {
                "id": turn.background,
                "object": "response",
                "created_at": int(self._wall()),
                "status": "queued",
                "model": turn.parsed.model,
                "output": [],
                "error": None,
                "incomplete_details": None,
                "usage": None,
                "metadata": turn.parsed.fields.get("metadata") or {},
            }
        )
        await self._store.put("response", turn.owner, reply, turn.items)
        key = (turn.owner, str(turn.background))
        task = asyncio.create_task(self._run(caller, turn, reply, work))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return reply

    async def cancel(self, owner: str, name: str) -> None:
        """Cancel a response; do nothing if it does not run here."""
        task = self._tasks.get((owner, name))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all responses."""
        for owner, name in tuple(self._tasks):
            await self.cancel(owner, name)

    async def _run(self, caller: Caller, turn: StoredTurn, reply: Item, work: Work) -> None:
        body = bytearray()
        await self._replace_unfinished(turn, {**reply, "status": "in_progress"})

        async def collect(message: Message) -> None:
            body.extend(message.get("body", b""))

        other = caller.recorded(collect)
        outcome = await settled(work(other))
        if isinstance(outcome, SylvanError):
            body = bytearray(refusal_of(Family.RESPONSES, outcome).body)
        elif isinstance(outcome, BaseException):
            log.error("a response in the background failed", exc_info=outcome)
        unknown = {"code": "server_error", "message": "The upstream server sent no response."}
        error = _error_in(bytes(body)) or unknown
        # does nothing if it has ended
        await self._replace_unfinished(turn, {**reply, "status": "failed", "error": error})

    async def _replace_unfinished(self, turn: StoredTurn, reply: Item) -> None:
        try:
            await self._store.replace_unfinished(turn.owner, reply)
        except CapacityError as error:
            log.warning("the response %s is not up to date: %s", turn.background, error)


def _error_in(body: bytes) -> Item | None:
    """Return the error in an answer, in the format of responses."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error: Any = cast("Item", found).get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return None
    details = cast("Item", error)
    code = details.get("code") or details.get("type") or "server_error"
    return {"code": str(code), "message": str(details.get("message", ""))}
