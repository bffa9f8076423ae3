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
