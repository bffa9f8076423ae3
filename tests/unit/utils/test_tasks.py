"""An event for one waiter."""

from __future__ import annotations

import asyncio

import pytest

from sylvan.utils.tasks import SingleWaiterEvent


async def test_it_wakes_a_waiter_that_is_there_and_one_that_comes() -> None:
    event = SingleWaiterEvent()
    waiting = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    event.set()
    await waiting
    await event.wait()  # it is still set
    event.clear()
    again = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    event.set()
    event.clear()  # a woken waiter continues
    await again


async def test_a_cancelled_waiter_leaves_it_to_the_next() -> None:
    event = SingleWaiterEvent()
    waiting = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    event.set()  # before the waiter knows
    with pytest.raises(asyncio.CancelledError):
        await waiting
    event.clear()
    next_one = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    event.set()
    await next_one
