"""Runs work so that its failure is a value, is shared by several callers, or wakes one waiter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def outcome_of(call: Callable[[], T]) -> T | Exception:
    """Return a call's result, or the exception it raised: `settled` for synchronous calls."""
    try:
        return call()
    except Exception as error:  # the caller decides how to handle it
        return error


async def settled(work: Awaitable[T]) -> T | BaseException:
    """Return the result of `work`, or the exception it raised.

    For boundaries where one failure must not stop the others. Cancelling the caller cancels `work`,
    and the cancellation propagates.
    """
    [outcome] = await asyncio.gather(work, return_exceptions=True)
    return outcome


class SharedTask(Generic[T]):
    """Runs some work once for all callers that ask while it runs."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the current run, or of a new one if none is running.

        Cancelling one caller does not cancel the work.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(work())
        return await asyncio.shield(self._task)


class SingleWaiterEvent:
    """Like `asyncio.Event`, for one waiter; faster, because a stream waits once per token."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Set the event, and wake the waiter if there is one."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Reset the event."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        if self._is_set:
            return
        assert self._waiter is None, "there is already a waiter"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
