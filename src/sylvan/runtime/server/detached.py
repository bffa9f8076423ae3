"""Calls that go on when their client has left, because it asked for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
_UNREAD_CHUNKS = 64


class Detached:
    """Keeps such calls alive; each ends with its request, as all others do at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Have `work` done beside the call."""
        self._keep(work)

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on if the caller is cancelled."""
        return await asyncio.shield(self._keep(work))

    async def stream(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The same chunks; if the reader leaves, the others are read and dropped."""
        queue: asyncio.Queue[T | None] = asyncio.Queue(_UNREAD_CHUNKS)
        gone = asyncio.Event()
        task = self._keep(_pump(chunks, queue, gone))
        task.add_done_callback(lambda _: None if queue.full() else queue.put_nowait(None))
        try:
            while not (task.done() and queue.empty()):
                if (chunk := await queue.get()) is not None:
                    yield chunk
            task.result()  # raises what went wrong
        finally:
            gone.set()
            while not queue.empty():  # a pump that waits for room goes on
                queue.get_nowait()

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client is told, if it is there


async def _pump(
    chunks: AsyncGenerator[T, None], queue: asyncio.Queue[T | None], gone: asyncio.Event
) -> None:
    async with aclosing(chunks):
        async for chunk in chunks:
            if not gone.is_set():
                await queue.put(chunk)
