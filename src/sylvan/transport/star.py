"""Channels between machines: one process in the centre, which others connect to over TCP.

ZeroMQ over TCP neither encrypts nor asks for a password, like torch.distributed: who reaches the
port can speak to the centre. Messages are decoded strictly, and never run code.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic

import zmq

from sylvan.protocol.errors import RankLostError
from sylvan.transport.api import ChannelFullError, Message, MessageError, Recv, Send
from sylvan.transport.codec import MAX_MESSAGE_BYTES, MessageDecoder, MessageEncoder
from sylvan.transport.zmq import MAX_QUEUED_MESSAGES, SEND_TIMEOUT_S, Context

_HELLO = b""
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 50, 1000
_LINGER_MS = 500


class AsyncCentre(Generic[Send, Recv]):
    """The centre, inside an event loop.

    Args:
        host: Address to listen at.
        port: 0: any.
        kind: Of messages that arrive.

    Raises:
        MessageError: The address cannot be listened on.
    """

    def __init__(self, context: Context, host: str, port: int, kind: object) -> None:
        self._socket, self.port = _bound(context, host, port)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._events = _Events(self._socket)

    def send(self, to: bytes, message: Send) -> bool:
        """Send to a peer; False if the message is dropped, because that has gone or is behind."""
        try:
            self._socket.send_multipart([to, self._encoder.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        finally:
            self._events.recheck()
        return True

    async def receive(self) -> tuple[bytes, Recv]:
        """The next message and who sent it.

        Raises:
            MessageError: what arrived is malformed; it is dropped.
        """
        while True:
            found = await self._events.next()
            if len(found) == 2:
                return found[0], self._decoder.decode(found[1])

    def close(self) -> None:
        """Messages under way get a moment. Idempotent."""
        self._events.close()
        self._socket.close(linger=_LINGER_MS)


class AsyncPoint(Generic[Send, Recv]):
    """A peer of an `AsyncCentre`, inside an event loop; it connects whenever that is there."""

    def __init__(self, context: Context, address: str, kind: object) -> None:
        self._socket = _connected(context, address, None)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._events = _Events(self._socket)

    def send(self, message: Send) -> None:
        """Never blocks; what cannot be sent for long is lost."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return
        self._events.recheck()

    async def receive(self) -> Recv:
        """See `AsyncReceiver.receive`."""
        return self._decoder.decode((await self._events.next())[-1])

    def close(self) -> None:
        """Messages under way get a moment. Idempotent."""
        self._events.close()
        self._socket.close(linger=_LINGER_MS)


class _Events:
    """Waits for messages at a socket that also sends; sending resets its descriptor's readiness."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._readable = asyncio.Event()
        self._closed = False
        self._loop.add_reader(self._fd, self._readable.set)

    def recheck(self) -> None:
        self._readable.set()

    async def next(self) -> list[bytes]:
        while True:
            self._readable.clear()
            try:
                return self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                await self._readable.wait()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)


class Centre(Generic[Send, Recv]):
    """The centre, for one thread that may block. Peers are known by secret names.

    Args:
        host: Address to listen at.
        names: Of the peers; others are not listened to.
        kind: Of messages that arrive.

    Attributes:
        port: That the system chose.

    Raises:
        MessageError: The address cannot be listened on.
    """

    def __init__(self, context: Context, host: str, names: Collection[str], kind: object) -> None:
        self._socket, self.port = _bound(context, host, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._come: dict[bytes, deque[bytes]] = {name.encode(): deque() for name in names}
        self._missing = [name.encode() for name in names]

    def join(self, timeout_s: float) -> str | None:
        """Wait until all peers have connected; the first that has not, or None."""
        until = time.monotonic() + timeout_s
        while self._missing:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._take(left_s):
                return self._missing[0].decode()
        return None

    def send(self, name: str, message: Send) -> None:
        """Send to a peer; blocks while that is far behind.

        Raises:
            RankLostError: it has gone.
            ChannelFullError: it stayed behind.
        """
        try:
            self._socket.send_multipart([name.encode(), self._encoder.encode(message)])
        except zmq.Again as error:
            raise ChannelFullError(f"{MAX_QUEUED_MESSAGES} messages wait to be read") from error
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise RankLostError("the connection to a rank of another machine is lost") from error

    def receive(self, name: str, timeout_s: float) -> Recv | None:
        """The next message of a peer, or None if there is none within `timeout_s`."""
        until = time.monotonic() + timeout_s
        come = self._come[name.encode()]
        while not come:
            if not self._take(max(0.0, until - time.monotonic())):
                return None
        return self._decoder.decode(come.popleft())

    def close(self) -> None:
        """Let go of it; idempotent."""
        self._socket.close(linger=0)

    def _take(self, timeout_s: float) -> bool:
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return False
        name, *data = self._socket.recv_multipart()
        if (come := self._come.get(name)) is not None:
            come.extend(part for part in data if part != _HELLO)
            if name in self._missing:
                self._missing.remove(name)
        return True


@dataclass(frozen=True, slots=True)
class Spoke(Generic[Send, Recv]):
    """A `DuplexChannel` from the centre to one peer; the centre closes it."""

    centre: Centre[Send, Recv]
    name: str

    def send(self, message: Send) -> None:
        self.centre.send(self.name, message)

    def receive(self, timeout_s: float = 0.0) -> Recv | None:
        return self.centre.receive(self.name, timeout_s)

    def close(self) -> None:
        pass


class Point(Generic[Message, Recv]):
    """A `DuplexChannel` from a peer to the centre, for one thread.

    Args:
        address: Of the centre.
        name: By which the centre knows this peer.
        kind: Of messages that arrive.
    """

    def __init__(self, context: Context, address: str, name: str, kind: object) -> None:
        self._socket = _connected(context, address, name.encode())
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._socket.send(_HELLO)

    def send(self, message: Message) -> None:
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again as error:
            raise ChannelFullError(f"{MAX_QUEUED_MESSAGES} messages wait to be read") from error

    def receive(self, timeout_s: float = 0.0) -> Recv | None:
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return self._decoder.decode(self._socket.recv_multipart()[-1])

    def close(self) -> None:
        self._socket.close(linger=0)


def _bound(context: Context, host: str, port: int) -> tuple[zmq.Socket[bytes], int]:
    socket: Any = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise MessageError(f"cannot listen at {host}:{port}: {error}") from error
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return socket, int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _connected(context: Context, address: str, name: bytes | None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
    if name is not None:
        socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(address)
    return socket
