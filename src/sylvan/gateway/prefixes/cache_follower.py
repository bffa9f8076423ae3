"""Keeps the exact index in step with workers' cache events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.events import AllBlocksCleared, EventBatch, read_batch
from sylvan.gateway.workers.events import EventSource, event_source
from sylvan.gateway.workers.worker import Worker

logger = logging.getLogger(__name__)

REPLAY_S = 5.0
"""Longest pause between two messages of a replay, in seconds."""
PAUSE_S = 1.0
"""Seconds between attempts at a replay."""
HIGH_WATER = 100_000
"""Messages queued here; the publisher drops further ones, which shows as a gap in the numbers."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A numbered message of a publisher."""

    number: int
    batch: EventBatch


class CacheFollower:
    """Follows every worker that publishes cache events; belongs to one event loop.

    A worker enters the index once all its events are known: from the first one on, from a replay
    that starts there, or from a moment when its cache was empty.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, worker: Worker) -> None:
        """Follow a worker from its start, if it publishes events."""
        source = event_source(worker.found.settings, worker.spec.url, worker.dp_rank)
        if source is None:
            return
        self.leave(worker)
        follower = _Follower(self._context, self._index, worker, source)
        self._tasks[worker.id] = asyncio.get_running_loop().create_task(follower.run())

    def leave(self, worker: Worker) -> None:
        """Stop following a worker."""
        task = self._tasks.pop(worker.id, None)
        if task is not None:
            task.cancel()
        self._index.drop(worker.id)

    def lost(self, worker: Worker) -> None:
        """Drop a worker's blocks: it is unhealthy and may have restarted."""
        if worker.id in self._tasks:
            self.follow(worker)

    async def close(self) -> None:
        """Stop following all workers."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


class _Follower:
    """Follows one worker.

    `_next` is the number of the next message; None while earlier messages are unknown.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        index: BlockIndex,
        worker: Worker,
        source: EventSource,
    ) -> None:
        self._context = context
        self._index = index
        self._worker = worker
        self._source = source
        self._next: int | None = None
        self._stamp_s = 0.0
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow the worker until cancelled."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        connected = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        watching = asyncio.create_task(self._watch(connected))
        try:
            socket.connect(self._source.endpoint)
            socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            while True:
                message = _message(await socket.recv_multipart())
                if message is not None:
                    async with self._lock:
                        await self._take(message)
        except zmq.ZMQError as error:
            logger.warning("cache events of %s: %s", self._worker.url, error)
        finally:
            watching.cancel()
            socket.disable_monitor()
            connected.close(linger=0)
            socket.close(linger=0)

    async def _watch(self, connected: zmq.asyncio.Socket) -> None:
        """Start over with each connection: the publisher may be a new process."""
        while True:
            await connected.recv_multipart()
            async with self._lock:
                self._forget()
                await self._catch_up(0)

    async def _take(self, message: _Message) -> None:
        expected = self._next
        if expected is not None and message.number < expected:
            if message.batch.stamp_s <= self._stamp_s:
                return  # already replayed
            self._forget()  # the worker restarted
            expected = None
        if message.number == 0:
            self._begin(0)
        elif expected != message.number:
            await self._catch_up(0 if expected is None else expected)
            if self._next is not None and message.number < self._next:
                return
            if self._next != message.number:
                self._forget()
        self._apply(message)

    def _apply(self, message: _Message) -> None:
        self._stamp_s = message.batch.stamp_s
        for event in message.batch.events:
            if self._next is None and isinstance(event, AllBlocksCleared):
                self._begin(message.number)  # the cache is empty, so earlier events do not matter
            if self._next is not None:
                self._index.apply(self._worker.id, event, plain=self._source.is_plain)
        if self._next is not None:
            self._next = message.number + 1

    async def _catch_up(self, first: int) -> None:
        """Replay messages from a number on, if the worker still has all of them."""
        if self._source.replay_endpoint is None:
            return
        while True:
            try:
                async with aclosing(self._replayed(first)) as messages:
                    async for message in messages:
                        if message.number == 0:
                            self._begin(0)
                        elif self._next != message.number:
                            self._forget()  # some messages in between were dropped
                        self._apply(message)
                        first = message.number + 1
            except TimeoutError:
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _replayed(self, first: int) -> AsyncGenerator[_Message, None]:
        assert self._source.replay_endpoint is not None, "the publisher has a replay socket"
        socket: Any = self._context.socket(zmq.DEALER)  # untyped frames
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self._source.replay_endpoint)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or not frames[3]:
                    return
                message = _message(frames[1:])
                if message is not None:
                    yield message
        finally:
            socket.close(linger=0)

    def _begin(self, number: int) -> None:
        self._next = number
        self._index.begin(self._worker.id)

    def _forget(self) -> None:
        self._next = None
        self._index.drop(self._worker.id)


def _message(frames: list[bytes]) -> _Message | None:
    """Decode a message of a publisher; None if it is malformed."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    try:
        return _Message(int.from_bytes(frames[1], "big"), read_batch(frames[2]))
    except ValueError as error:
        logger.warning("cache events: %s", error)
        return None
