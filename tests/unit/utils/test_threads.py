from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from sylvan.utils.threads import call_in_pool, call_in_thread


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
