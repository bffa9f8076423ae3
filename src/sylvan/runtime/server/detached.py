"""Calls that continue after their client disconnected, because it asked for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
_UNREAD_CHUNKS = 64


class Detached:
    """Keeps detached calls alive; each ends with its request, all of them at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start `work` in the background."""
        self._keep(work)

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which continues if the caller is cancelled."""
        return await asyncio.shield(self._keep(work))

    async def stream(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the same chunks; if the reader leaves, the rest is read and dropped."""
        queue: asyncio.Queue[T | None] = asyncio.Queue(_UNREAD_CHUNKS)
        gone = asyncio.Event()
        task = self._keep(_pump(chunks, queue, gone))
        task.add_done_callback(lambda _: None if queue.full() else queue.put_nowait(None))
        try:
            while not (task.done() and queue.empty()):
                if (chunk := await queue.get()) is not None:
                    yield chunk
            task.result()  # re-raises the error
        finally:
            gone.set()
            while not queue.empty():  # unblock a pump that waits for queue space
                queue.get_nowait()

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client gets the error, if it is still connected


async def _pump(
    chunks: AsyncGenerator[T, None], queue: asyncio.Queue[T | None], gone: asyncio.Event
) -> None:
    async with aclosing(chunks):
        async for chunk in chunks:
            if not gone.is_set():
                await queue.put(chunk)
