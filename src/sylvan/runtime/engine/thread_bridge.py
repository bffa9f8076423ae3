"""Bridges an async generator on the engine's loop to a reader in another thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from sylvan.protocol.errors import CapacityError

T = TypeVar("T")

END = object()
"""Returned after the last item."""
SHUT_DOWN = "the engine has been shut down"


class ThreadBridge(Generic[T]):
    """Runs a generator at most one item ahead of its reader.

    A fast reader finds each item without waking the loop, and is woken once per item. For
    a slow one the generator waits, so that its source can merge unread items.

    Args:
        items: The generator; started at once.
        loop: The loop that it runs on.
    """

    def __init__(self, items: AsyncGenerator[T, None], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()  # of all following items
        self._unread: list[object] = []  # at most one item, then the error that ended the generator
        self._reader: Future[Any] | None = None
        self._waits = False  # held by the reader to keep the generator
        self._over = False
        self._room = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        asyncio.run_coroutine_threadsafe(self._run(items), loop)

    def read(self) -> Future[Any]:
        """Return the next item, or `END`; for one reader, one call at a time.

        Raises (from the future):
            CapacityError: The engine was shut down.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._unread:
                found = self._unread.pop(0)
                if self._waits and not self._over:
                    self._waits = False
                    self._loop.call_soon_threadsafe(self._room.set)
            elif self._over:
                found = CapacityError(SHUT_DOWN)
            else:
                self._reader = future
                return future
        _complete(future, found)
        return future

    async def close(self) -> None:
        """Close the generator in any state; call on its loop. Idempotent."""
        if self._worker is not None and not self._worker.done():
            self._worker.cancel()
            await asyncio.wait([self._worker])

    async def _run(self, items: AsyncGenerator[T, None]) -> None:
        self._worker = asyncio.current_task()
        assert self._worker is not None, "called outside of a task"
        self._worker.add_done_callback(self._end)
        async with aclosing(items):
            async for item in items:
                await self._give(item)
        await self._give(END)

    async def _give(self, item: object) -> None:
        while not self._offer(item):
            await self._room.wait()

    def _offer(self, item: object) -> bool:
        """Pass an item to the reader, or buffer it; False if the last one is still unread."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is None or not reader.set_running_or_notify_cancel():
                if self._unread:
                    self._waits = True
                    self._room.clear()
                    return False
                self._unread.append(item)
                return True
        _complete(reader, item)
        return True

    def _end(self, worker: asyncio.Task[None]) -> None:
        """Pass the generator's error after its last item."""
        error = None if worker.cancelled() else worker.exception()
        with self._lock:
            self._over = True
            reader, self._reader = self._reader, None
            if reader is None or not reader.set_running_or_notify_cancel():
                self._unread += [] if error is None else [error]
                return
        reader.set_exception(error or CapacityError(SHUT_DOWN))


def _complete(future: Future[Any], found: object) -> None:
    if isinstance(found, BaseException):
        future.set_exception(found)
    else:
        future.set_result(found)
