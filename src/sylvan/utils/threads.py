"""Calls in threads whose outcome always reaches the coroutine that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in one of the event loop's own threads.

    Raises:
        RuntimeError: The function let a StopIteration escape, which a future cannot hold.
    """
    return await asyncio.to_thread(_call, lambda: function(*args, **kwargs))


async def call_in_pool(
    pool: Executor, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function in a thread of `pool`.

    Raises:
        RuntimeError: The function let a StopIteration escape, which a future cannot hold.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, _call, lambda: function(*args, **kwargs))


def _call(function: Callable[[], T]) -> T:
    try:
        return function()
    except StopIteration as error:
        # asyncio.Future refuses it in a callback, and whoever awaits the future waits for ever
        raise RuntimeError("a call in a thread raised StopIteration") from error
