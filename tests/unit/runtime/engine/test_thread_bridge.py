"""Items of a generator on one loop, read in threads and on other loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.runtime.engine.thread_bridge import END, ThreadBridge

LONG_S = 60.0


class Loop:
    """An event loop in a thread, and a generator on it that tells how far it is."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.made = 0
        self.closed = threading.Event()

    def feed(self, count: int, error: Exception | None = None) -> ThreadBridge[int]:
        return ThreadBridge(self.numbers(count, error), self.loop)

    async def numbers(self, count: int, error: Exception | None) -> AsyncGenerator[int, None]:
        try:
            for number in range(count):
                self.made += 1
                yield number
            if error is not None:
                raise error
            if count == 0:
                await asyncio.Event().wait()
        finally:
            self.closed.set()

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG_S)

    def settle(self) -> None:
        """Until the loop has nothing to do."""
        for _ in range(5):
            self.do(asyncio.sleep(0))

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def host() -> Iterator[Loop]:
    host = Loop()
    yield host
    host.end()


def read(feed: ThreadBridge[int]) -> object:
    return feed.read().result(LONG_S)


def test_items_are_read_in_order_up_to_the_end(host: Loop) -> None:
    feed = host.feed(100)

    assert [read(feed) for _ in range(101)] == [*range(100), END]
    assert host.closed.wait(LONG_S)


async def test_another_loop_may_read(host: Loop) -> None:
    feed = host.feed(20)

    found = [await asyncio.wrap_future(feed.read()) for _ in range(21)]

    assert found == [*range(20), END]


def test_the_generator_is_one_item_ahead_of_its_reader(host: Loop) -> None:
    feed = host.feed(100)
    host.settle()
    assert host.made == 2  # one is unread, one waits for its place

    assert [read(feed), read(feed)] == [0, 1]
    host.settle()
    assert host.made == 4


def test_an_error_comes_after_what_was_there_before_it(host: Loop) -> None:
    feed = host.feed(2, RequestError("no", param="text"))

    assert [read(feed), read(feed)] == [0, 1]
    with pytest.raises(RequestError, match="no"):
        read(feed)


@pytest.mark.parametrize("count", [0, 1, 100])
def test_closing_closes_the_generator_wherever_it_is(host: Loop, count: int) -> None:
    feed = host.feed(count)
    host.do(feed.close())
    host.do(feed.close())

    assert host.closed.is_set()
    assert host.made <= 2


def test_a_reader_that_went_away_loses_nothing(host: Loop) -> None:
    gate = asyncio.Event()

    async def gated() -> AsyncGenerator[int, None]:
        await gate.wait()
        yield 7

    feed = ThreadBridge(gated(), host.loop)
    assert feed.read().cancel()
    host.loop.call_soon_threadsafe(gate.set)

    assert [read(feed), read(feed)] == [7, END]


def test_a_reader_is_notified_when_the_loop_ends(host: Loop) -> None:
    feed = host.feed(0)
    waiting = feed.read()
    host.do(feed.close())

    for future in (waiting, feed.read()):
        with pytest.raises(CapacityError, match="shut down"):
            future.result(LONG_S)
