"""Channels with delayed messages, for fault injection."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic

from sylvan.transport.api import (
    AsyncReceiver,
    ChannelFullError,
    Message,
    MessageError,
    MessageSender,
)

Delay = Callable[[], float]
"""Returns the delay of the next message in seconds."""


class DelayedSender(Generic[Message]):
    """Sends messages with delays, in order; undeliverable ones are lost."""

    def __init__(self, sender: MessageSender[Message], delay: Delay) -> None:
        self._sender = sender
        self._delay = delay
        self._due_s = 0.0
        self._waiting: deque[Message] = deque()
        self._closed = False

    def send(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s, loop.time() + self._delay())
        self._waiting.append(message)
        loop.call_at(self._due_s, self._leave)  # equal times have no order

    def close(self) -> None:
        self._closed = True
        self._sender.close()

    def _leave(self) -> None:
        if not self._closed:
            with contextlib.suppress(ChannelFullError, MessageError):
                self._sender.send(self._waiting.popleft())


class DelayedReceiver(Generic[Message]):
    """Delivers received messages with delays, in order."""

    def __init__(self, receiver: AsyncReceiver[Message], delay: Delay) -> None:
        self._receiver = receiver
        self._delay = delay
        self._come: asyncio.Queue[tuple[float, Message]] = asyncio.Queue()
        self._pump = asyncio.get_running_loop().create_task(self._take())

    async def receive(self) -> Message:
        get = asyncio.ensure_future(self._come.get())
        try:
            await asyncio.wait({get, self._pump}, return_when=asyncio.FIRST_COMPLETED)
            if not get.done():
                await self._pump  # re-raises the receiver's error
            due_s, message = await get
        finally:
            get.cancel()
        await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
        return message

    def close(self) -> None:
        self._pump.cancel()
        self._receiver.close()

    async def _take(self) -> None:
        while True:
            message = await self._receiver.receive()
            due_s = asyncio.get_running_loop().time() + self._delay()
            self._come.put_nowait((due_s, message))
