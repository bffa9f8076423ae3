from __future__ import annotations

import asyncio
from random import Random

import pytest

from sylvan.transport.api import ChannelFullError, MessageError
from sylvan.transport.delayed import DelayedReceiver, DelayedSender

DEADLINE_S = 60
COUNT = 200


class Wire:
    """Keeps what is sent, and gives it out again."""

    def __init__(self):
        self.messages = []
        self.queue = asyncio.Queue()
        self.closed = False

    def send(self, message):
        if message == "full":
            raise ChannelFullError("full")
        self.messages.append(message)

    async def receive(self):
        message = await self.queue.get()
        if message == "bad":
            raise MessageError("bad")
        return message

    def close(self):
        self.closed = True


def delay():
    random = Random(1)
    return lambda: random.uniform(0, 0.01)


async def test_messages_leave_late_and_in_order():
    wire = Wire()
    late = DelayedSender(wire, delay())
    late.send("full")
    for i in range(COUNT):
        late.send(i)
    assert wire.messages == []

    async with asyncio.timeout(DEADLINE_S):
        while len(wire.messages) < COUNT:
            await asyncio.sleep(0.01)

    assert wire.messages == list(range(COUNT))
    late.send("after the end")
    late.close()
    await asyncio.sleep(0.05)
    assert wire.closed
    assert "after the end" not in wire.messages


async def test_messages_are_given_out_late_and_in_order():
    wire = Wire()
    late = DelayedReceiver(wire, delay())
    for i in range(COUNT):
        wire.queue.put_nowait(i)

    async with asyncio.timeout(DEADLINE_S):
        assert [await late.receive() for _ in range(COUNT)] == list(range(COUNT))
        wire.queue.put_nowait("bad")
        with pytest.raises(MessageError):
            await late.receive()
    late.close()
    assert wire.closed
