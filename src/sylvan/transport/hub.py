"""Channels between machines: a hub listens on TCP, and clients connect to it.

As with torch.distributed, ZeroMQ over TCP is neither encrypted nor authenticated: any process that
reaches the port can send messages to the hub. Messages are decoded strictly and never run code.
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


class AsyncHub(Generic[Send, Recv]):
    """A hub inside an event loop.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: the system chooses one.
        kind: Type of the messages that arrive.

    Raises:
        MessageError: The address cannot be listened on.
    """

    def __init__(self, context: Context, host: str, port: int, kind: object) -> None:
        self._socket, self.port = _bound(context, host, port)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._events = _Events(self._socket)

    def send(self, to: bytes, message: Send) -> bool:
        """Send to a client; False if it is gone or too slow, and the message was dropped."""
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
        """Return the ID of the sender, and the next message.

        Raises:
            MessageError: The received data is malformed; it is dropped.
        """
        while True:
            found = await self._events.next()
            if len(found) == 2:
                return found[0], self._decoder.decode(found[1])

    def close(self) -> None:
        """Close the hub after up to half a second for queued messages; idempotent."""
        self._events.close()
        self._socket.close(linger=_LINGER_MS)


class AsyncHubClient(Generic[Send, Recv]):
    """A client of an `AsyncHub`, inside an event loop; connects, and reconnects, by itself."""

    def __init__(self, context: Context, address: str, kind: object) -> None:
        self._socket = _connected(context, address, None)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._events = _Events(self._socket)

    def send(self, message: Send) -> None:
        """Send a message without blocking; dropped if the queue is full."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return
        self._events.recheck()

    async def receive(self) -> Recv:
        """See `AsyncReceiver.receive`."""
        return self._decoder.decode((await self._events.next())[-1])

    def close(self) -> None:
        """Close the client after up to half a second for queued messages; idempotent."""
        self._events.close()
        self._socket.close(linger=_LINGER_MS)


class _Events:
    """Waits for messages on a socket that also sends: sending clears its descriptor's readiness."""

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


class Hub(Generic[Send, Recv]):
    """A hub for one thread that may block. Clients identify themselves by secret names.

    Args:
        host: Address to listen on.
        names: Names of the clients; messages from others are ignored.
        kind: Type of the messages that arrive.

    Attributes:
        port: Listening port, which the system chose.

    Raises:
        MessageError: The address cannot be listened on.
    """

    def __init__(self, context: Context, host: str, names: Collection[str], kind: object) -> None:
        self._socket, self.port = _bound(context, host, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Recv] = MessageDecoder(kind)
        self._received: dict[bytes, deque[bytes]] = {name.encode(): deque() for name in names}
        self._missing = [name.encode() for name in names]

    def join(self, timeout_s: float) -> str | None:
        """Wait until all clients have connected; return the first that did not, or None."""
        until = time.monotonic() + timeout_s
        while self._missing:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._take(left_s):
                return self._missing[0].decode()
        return None

    def send(self, name: str, message: Send) -> None:
        """Send to a client; blocks while its queue is full.

        Raises:
            RankLostError: The client is gone.
            ChannelFullError: Its queue stayed full; the message was not sent.
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
        """Return the next message of a client, or None if there is none within `timeout_s`."""
        until = time.monotonic() + timeout_s
        received = self._received[name.encode()]
        while not received:
            if not self._take(max(0.0, until - time.monotonic())):
                return None
        return self._decoder.decode(received.popleft())

    def close(self) -> None:
        """Close the hub; idempotent."""
        self._socket.close(linger=0)

    def _take(self, timeout_s: float) -> bool:
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return False
        name, *data = self._socket.recv_multipart()
        if (received := self._received.get(name)) is not None:
            received.extend(part for part in data if part != _HELLO)
            if name in self._missing:
                self._missing.remove(name)
        return True


@dataclass(frozen=True, slots=True)
class HubPeer(Generic[Send, Recv]):
    """A `DuplexChannel` from the hub to one client; closed with the hub."""

    hub: Hub[Send, Recv]
    name: str

    def send(self, message: Send) -> None:
        self.hub.send(self.name, message)

    def receive(self, timeout_s: float = 0.0) -> Recv | None:
        return self.hub.receive(self.name, timeout_s)

    def close(self) -> None:
        pass


class HubClient(Generic[Message, Recv]):
    """A `DuplexChannel` from a client to the hub, for one thread.

    Args:
        address: Address of the hub.
        name: Secret name that identifies this client.
        kind: Type of the messages that arrive.
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
