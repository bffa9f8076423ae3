"""What became of work that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def outcome_of(call: Callable[[], T]) -> T | Exception:
    """What a call returns, or what it raises: `settled`, for calls that do not wait."""
    try:
        return call()
    except Exception as error:  # the caller's to judge
        return error


async def settled(work: Awaitable[T]) -> T | BaseException:
    """The result of `work`, or what it raised.

    For boundaries behind which others must go on. Cancelling the caller cancels `work` and passes
    through.
    """
    [outcome] = await asyncio.gather(work, return_exceptions=True)
    return outcome
