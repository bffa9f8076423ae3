from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sylvan.utils.threads import call_in_pool, call_in_thread, lower_priority


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), ValueError(), KeyError()])
async def test_every_exception_reaches_the_caller(error):
    def fail() -> None:
        raise error

    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with ThreadPoolExecutor(1) as pool:
        for call in (call_in_thread(fail), call_in_pool(pool, fail)):
            with pytest.raises(kind):
                await asyncio.wait_for(call, 10)


async def test_results_and_arguments_pass_through():
    with ThreadPoolExecutor(1) as pool:
        assert await call_in_thread(int, "7", base=8) == 7
        assert await call_in_pool(pool, int, "7", base=8) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_thread_that_gives_way_is_the_only_one():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = niceness()
    with ThreadPoolExecutor(1, initializer=lower_priority) as pool:
        assert pool.submit(niceness).result() >= max(mine, 10)
        inner = pool.submit(lambda: ThreadPoolExecutor(1).submit(niceness).result()).result()
        assert inner >= max(mine, 10)
    assert niceness() == mine
