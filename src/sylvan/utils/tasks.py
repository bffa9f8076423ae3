"""Outcomes of background work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def outcome_of(call: Callable[[], T]) -> T | Exception:
    """Return a call's result, or the exception it raised: `settled` for synchronous calls."""
    try:
        return call()
    except Exception as error:  # the caller's to judge
        return error


async def settled(work: Awaitable[T]) -> T | BaseException:
    """The result of `work`, or what it raised.

    For boundaries where one failure must not stop the others. Cancelling the caller cancels `work`
    and passes through.
    """
    [outcome] = await asyncio.gather(work, return_exceptions=True)
    return outcome


class Shared(Generic[T]):
    """One run of some work at a time, for all who ask while it is under way."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the run that is under way, or of a new one.

        Cancelling one caller leaves the work to the others.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(work())
        return await asyncio.shield(self._task)


class SingleWaiterEvent:
    """As `asyncio.Event`, for one waiter: a stream waits once for each token."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, now or when it comes."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Let the next `wait` wait again."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._is_set:
            return
        assert self._waiter is None, "another one waits"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
