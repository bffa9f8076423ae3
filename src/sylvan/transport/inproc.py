"""Channels inside one process: between threads, and from threads to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic

from sylvan.transport.api import ChannelFullError, Message

MAX_MESSAGES = 65536
SEND_TIMEOUT_S = 10.0


class Pipe(Generic[Message]):
    """Both ends of one direction; any thread may use either."""

    def __init__(
        self, capacity: int = MAX_MESSAGES, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._capacity = capacity
        self._send_timeout_s = send_timeout_s
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def send(self, message: Message) -> None:
        with self._changed:
            room = self._changed.wait_for(self._has_room, self._send_timeout_s)
            if not room:
                raise ChannelFullError(f"{self._capacity} messages wait to be read")
            if not self._closed:
                self._messages.append(message)
                self._changed.notify_all()

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        with self._changed:
            if not self._messages and timeout_s > 0:
                self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            if not self._messages:
                return None
            if len(self._messages) >= self._capacity:
                self._changed.notify_all()
            return self._messages.popleft()

    def close(self) -> None:
        """Drop all later messages."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._closed or len(self._messages) < self._capacity


class AsyncPipe(Generic[Message]):
    """One direction into an event loop: any thread sends, one task of the loop receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int = MAX_MESSAGES) -> None:
        self._loop = loop
        self._pipe: Pipe[Message] = Pipe(capacity)
        self._arrived = asyncio.Event()
        self._waking = threading.Lock()  # held from the first unread message until it is read
        self._closed = False

    def send(self, message: Message) -> None:
        self._pipe.send(message)
        if not self._closed and self._waking.acquire(blocking=False):
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:  # the loop is closed, so nothing reads this
                self.close()

    async def receive(self) -> Message:
        while (message := self._pipe.receive()) is None:
            self._arrived.clear()
            if self._waking.locked():
                self._waking.release()
            # sent between the two lines above: the sender saw the lock held and did not wake the
            # reader
            if (message := self._pipe.receive()) is not None:
                return message
            await self._arrived.wait()
        return message

    def close(self) -> None:
        self._closed = True
        self._pipe.close()
