"""Calls functions in threads from coroutines, and lowers the priority of threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_NICENESS = 10  # beside a thread of normal priority: about a tenth of a core


def lower_priority() -> None:
    """Lower the CPU priority of the calling thread, and of threads that it starts.

    Has no effect where threads have no priorities of their own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # the system may forbid it
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(own, _NICENESS))


async def call_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread of the event loop's default pool.

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
        # asyncio.Future rejects it in a callback, and the waiter would wait forever
        raise RuntimeError("a call in a thread raised StopIteration") from error
