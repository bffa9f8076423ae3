"""Channels over TCP: a fixed header, the message, the payload."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np

from sylvan.runtime.features.disagg.channel import (
    MAX_MESSAGE,
    Buffer,
    Channel,
    ChannelError,
    Place,
    Serve,
)
from sylvan.utils.tasks import settled

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
MAX_CONNECTIONS = 4096
_WAKE_BYTES = 512 << 10
"""Payload bytes that arrive before the loop is woken: each wake-up costs 30 us."""
_HEAD = struct.Struct("!4sIQ")  # magic, size of the message, size of the payload
_MAGIC = b"SyKV"


class TcpChannel:
    """Implements `Channel` over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._wakes_after = 1
        self._loop = asyncio.get_running_loop()

    @property
    def same_machine(self) -> bool:
        """See `Channel.same_machine`."""
        try:
            return self._socket.getsockname()[0] == self._socket.getpeername()[0]
        except OSError:
            return False

    async def send(self, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        """See `Channel.send`."""
        head = _HEAD.pack(_MAGIC, len(message), sum(part.nbytes for part in payload))
        try:
            await self._loop.sock_sendall(self._socket, head + message)
            for part in payload:
                await self._loop.sock_sendall(self._socket, part.data)
        except OSError as error:
            raise ChannelError(f"the connection broke: {error}") from None

    async def receive(
        self, limit: int = 0, place: Place | None = None
    ) -> tuple[bytes, Sequence[Buffer]]:
        """See `Channel.receive`."""
        head = np.empty(_HEAD.size, np.uint8)
        await self._fill(head)
        magic, length, size = _HEAD.unpack(head.tobytes())
        if magic != _MAGIC:
            raise ChannelError("the peer speaks another protocol")
        if length > MAX_MESSAGE or size > limit:
            raise ChannelError(f"a message of {length} and {size} bytes is too large")
        body = np.empty(length, np.uint8)
        await self._fill(body)
        message = body.tobytes()
        payload = [np.empty(size, np.uint8)] if place is None else place(message, size)
        for part in payload:
            await self._fill(part)
        return message, payload

    def close(self) -> None:
        """See `Channel.close`."""
        self._socket.close()

    async def _fill(self, buffer: Buffer) -> None:
        rest = buffer.data
        while len(rest):
            self._wake_after(min(len(rest), _WAKE_BYTES))
            try:
                count = await self._loop.sock_recv_into(self._socket, rest)
            except OSError as error:
                raise ChannelError(f"the connection broke: {error}") from None
            if not count:
                raise ChannelError("the peer closed the connection")
            rest = rest[count:]

    def _wake_after(self, num_bytes: int) -> None:
        """Wake up only after that many bytes or at the end, where the system supports it."""
        if num_bytes == self._wakes_after or sys.platform != "linux":
            return
        self._wakes_after = num_bytes
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        except OSError as error:
            raise ChannelError(f"the connection broke: {error}") from None


class TcpNetwork:
    """Implements `Network`; belongs to one event loop."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, serve: Serve) -> int:
        """See `Network.listen`."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            sock.bind(address)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
        self._listening.append(sock)
        self._start(self._accept(sock, serve))
        return int(sock.getsockname()[1])

    async def connect(self, host: str, port: int) -> Channel:
        """See `Network.connect`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                sock = socket.socket(family, kind, protocol)
                try:
                    sock.setblocking(False)
                    await loop.sock_connect(sock, address)
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            message = f"{host}:{port} did not answer within {CONNECT_S:g} s"
            raise ChannelError(message) from None
        except OSError as error:
            raise ChannelError(f"{host}:{port} cannot be reached: {error}") from None
        return TcpChannel(sock)

    def close(self) -> None:
        """See `Network.close`."""
        for sock in self._listening:
            sock.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, listening: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or the peer has already disconnected
                logger.warning("a decode server could not connect: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > MAX_CONNECTIONS:
                sock.close()
                continue
            self._start(self._serve(TcpChannel(sock), serve))

    async def _serve(self, channel: TcpChannel, serve: Serve) -> None:
        try:
            outcome = await settled(serve(channel))
        finally:
            channel.close()
        if isinstance(outcome, Exception):
            logger.error("a connection of a decode server failed", exc_info=outcome)

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
