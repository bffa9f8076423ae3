"""Messages between the processes of the gateway, over ZeroMQ."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sylvan.gateway.peers.messages import Message, PeerBatch
from sylvan.protocol.malformed import MALFORMED

logger = logging.getLogger(__name__)

HIGH_WATER = 10_000
"""Batches queued for a slow process before it loses some; important state is repeated."""


class PeerChannel:
    """The sockets of one process; belongs to one event loop.

    Args:
        folder: Private directory of the sockets.
        number: Index of this process.
        count: Number of processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._number = number
        self._context = zmq.asyncio.Context()
        self._out = self._socket(zmq.PUB)
        self._out.bind(_address(folder, number))
        self._in = self._socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        for other in range(count):
            if other != number:
                self._in.connect(_address(folder, other))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(PeerBatch)

    def send(self, messages: list[Message]) -> None:
        """Send to all other processes; those that are not running miss it."""
        data = self._encoder.encode(PeerBatch(self._number, messages))
        self._out.send(data)

    async def receive(self) -> PeerBatch:
        """Receive the next batch of another process."""
        while True:
            data = await self._in.recv()
            try:
                return self._decoder.decode(data)
            except MALFORMED as error:
                logger.warning("another process of this gateway sent an invalid message: %s", error)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        return socket


def _address(folder: Path, number: int) -> str:
    return f"ipc://{folder}/peer-{number}"
