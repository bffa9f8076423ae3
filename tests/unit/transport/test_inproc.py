from __future__ import annotations

import asyncio
import threading

import pytest

from sylvan.transport.api import ChannelFullError
from sylvan.transport.inproc import AsyncPipe, Pipe


def test_a_full_pipe_refuses_after_its_patience() -> None:
    pipe: Pipe[int] = Pipe(capacity=2, send_timeout_s=0.01)
    pipe.send(1)
    pipe.send(2)

    with pytest.raises(ChannelFullError, match="2 messages"):
        pipe.send(3)

    assert [pipe.receive(), pipe.receive(), pipe.receive()] == [1, 2, None]


def test_a_sender_waits_for_room() -> None:
    pipe: Pipe[int] = Pipe(capacity=1, send_timeout_s=30)
    pipe.send(1)
    sender = threading.Thread(target=pipe.send, args=(2,))
    sender.start()

    assert pipe.receive(30) == 1
    assert pipe.receive(30) == 2
    sender.join()


def test_what_is_sent_after_close_is_dropped() -> None:
    pipe: Pipe[int] = Pipe(capacity=1)
    pipe.close()
    pipe.send(1)
    pipe.send(2)

    assert pipe.receive(10) is None


async def test_threads_reach_a_loop_without_losing_messages() -> None:
    pipe: AsyncPipe[tuple[int, int]] = AsyncPipe(asyncio.get_running_loop())

    def send(sender: int) -> None:
        for i in range(1000):
            pipe.send((sender, i))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(60):
        got = [await pipe.receive() for _ in range(4000)]
    for thread in threads:
        thread.join()

    for n in range(4):
        assert [i for sender, i in got if sender == n] == list(range(1000))


def test_a_thread_may_outlive_the_loop() -> None:
    loop = asyncio.new_event_loop()
    pipe: AsyncPipe[int] = AsyncPipe(loop)
    loop.close()

    pipe.send(1)
    pipe.send(2)
