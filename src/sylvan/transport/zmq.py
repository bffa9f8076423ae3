"""Channels between the processes of one machine: ZeroMQ over unix sockets.

The receiving end binds, the sending ends connect and reconnect automatically, so either process
may start first or restart. Messages to a dead process wait for the next one that
binds the address.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic

import zmq

from sylvan.transport.api import ChannelFullError, Message, MessageError
from sylvan.transport.codec import MAX_MESSAGE_BYTES, MessageDecoder, MessageEncoder

Context = zmq.Context[zmq.Socket[bytes]]

MAX_QUEUED_MESSAGES = 10_000
MAX_BACKLOG_MESSAGES = 65_536
SEND_TIMEOUT_S = 10.0
_RETRY_S = 0.005
_RECONNECT_MS = 20


class PushSender(Generic[Message]):
    """The sending end; for one thread."""

    def __init__(self, context: Context, address: str, encoder: MessageEncoder) -> None:
        self._socket = _push(context, address)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        self._encoder = encoder

    def send(self, message: Message) -> None:
        data = self._encoder.encode(message)
        try:
            self._socket.send(data)
        except zmq.Again as error:
            raise ChannelFullError(f"{MAX_QUEUED_MESSAGES} messages wait to be read") from error

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncPushSender(Generic[Message]):
    """The sending end on an event loop; what the socket cannot take waits in a backlog."""

    def __init__(self, context: Context, address: str, encoder: MessageEncoder) -> None:
        self._socket = _push(context, address)
        self._encoder = encoder
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def send(self, message: Message) -> None:
        """Never blocks."""
        if len(self._backlog) >= MAX_BACKLOG_MESSAGES:
            raise ChannelFullError(f"{MAX_BACKLOG_MESSAGES} messages wait to be read")
        self._backlog.append(self._encoder.encode(message))
        if self._retry is None:
            self._flush()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._backlog.clear()
        self._socket.close(linger=0)

    def _flush(self) -> None:
        self._retry = None
        while self._backlog:
            try:
                self._socket.send(self._backlog[0], zmq.DONTWAIT)
            except zmq.Again:
                self._retry = self._loop.call_later(_RETRY_S, self._flush)
                return
            self._backlog.popleft()


class PullReceiver(Generic[Message]):
    """The receiving end, at one or more addresses; for one thread."""

    def __init__(
        self,
        context: Context,
        addresses: Sequence[str],
        decoder: MessageDecoder[Message],
    ) -> None:
        self._socket = _pull(context, addresses)
        self._decoder = decoder

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        try:
            data = self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            if timeout_s <= 0 or not self._socket.poll(max(1, int(timeout_s * 1000))):
                return None
            data = self._socket.recv(zmq.DONTWAIT)
        return self._decoder.decode(data)

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncPullReceiver(Generic[Message]):
    """The receiving end on an event loop; for one task."""

    def __init__(
        self,
        context: Context,
        addresses: Sequence[str],
        decoder: MessageDecoder[Message],
    ) -> None:
        self._socket = _pull(context, addresses)
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._readable = asyncio.Event()
        self._closed = False
        self._loop.add_reader(self._fd, self._readable.set)

    async def receive(self) -> Message:
        while True:
            # the descriptor signals changes only: read everything before waiting again
            self._readable.clear()
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                await self._readable.wait()
            else:
                return self._decoder.decode(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def _push(context: Context, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.connect(address)
    return socket


def _pull(context: Context, addresses: Sequence[str]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    for address in addresses:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise MessageError(f"cannot listen at {address}: {error}") from error
    return socket
