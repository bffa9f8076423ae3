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
"""What is read after the last item."""
SHUT_DOWN = "the engine has been shut down"


class ThreadBridge(Generic[T]):
    """Runs a generator, at most one item ahead of its reader.

    A reader that keeps up finds each item without waking the loop, and is woken once for it. For
    one that does not the generator waits, so that its source can merge what is left unread.

    Args:
        items: Started at once.
        loop: Where it runs.
    """

    def __init__(self, items: AsyncGenerator[T, None], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()  # of all that follows
        self._unread: list[object] = []  # at most one item, then the error that ended them
        self._reader: Future[Any] | None = None
        self._waits = False  # the generator, for the reader
        self._over = False
        self._room = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        asyncio.run_coroutine_threadsafe(self._run(items), loop)

    def read(self) -> Future[Any]:
        """The next item, or `END`; for one reader, which waits for it before asking again.

        Raises (from the future):
            CapacityError: the engine was shut down.
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
        _settle(future, found)
        return future

    async def close(self) -> None:
        """Close the generator, wherever it is; on its loop. Idempotent."""
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
        """Hand an item to the reader, or keep it for him; False if he has not read the last one."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is None or not reader.set_running_or_notify_cancel():
                if self._unread:
                    self._waits = True
                    self._room.clear()
                    return False
                self._unread.append(item)
                return True
        _settle(reader, item)
        return True

    def _end(self, worker: asyncio.Task[None]) -> None:
        """What ended the generator is read after its last item."""
        error = None if worker.cancelled() else worker.exception()
        with self._lock:
            self._over = True
            reader, self._reader = self._reader, None
            if reader is None or not reader.set_running_or_notify_cancel():
                self._unread += [] if error is None else [error]
                return
        reader.set_exception(error or CapacityError(SHUT_DOWN))


def _settle(future: Future[Any], found: object) -> None:
    if isinstance(found, BaseException):
        future.set_exception(found)
    else:
        future.set_result(found)
