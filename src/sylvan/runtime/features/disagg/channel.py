"""Messages between two servers, in order, whatever carries them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]

Place = Callable[[bytes, int], Sequence[Buffer]]
"""Where the payload of a message goes, by the message and the bytes of its payload."""

MAX_MESSAGE = 1 << 20
"""Bytes of a message without its payload."""


class ChannelError(Exception):
    """The peer is gone, or does not speak this protocol."""


class Channel(Protocol):
    """One connection. Only its owner's event loop may use it; one sends and one receives at a time.

    What was sent arrives once, in order and unchanged, or the channel fails.
    """

    @property
    def same_machine(self) -> bool:
        """Whether both ends have an address of this machine."""
        ...

    async def send(self, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        """The buffers of `payload` are sent one after another, as one.

        Returns when `payload` may be changed again; waits while the peer does not read.

        Raises:
            ChannelError: the peer is gone.
        """
        ...

    async def receive(
        self, most: int = 0, place: Place | None = None
    ) -> tuple[bytes, Sequence[Buffer]]:
        """The next message, and its payload of at most `most` bytes, in one new buffer.

        With `place` it is written where that says, into buffers of as many bytes.

        Raises:
            ChannelError: the peer is gone, or what came is no message.
        """
        ...

    def close(self) -> None:
        """End the connection; harmless when repeated."""
        ...


Serve = Callable[[Channel], Awaitable[None]]


class Network(Protocol):
    """Makes channels."""

    async def listen(self, host: str, port: int, serve: Serve) -> int:
        """Call `serve` for each channel that peers open, as a task; returns the port.

        Raises:
            OSError: the address cannot be used.
        """
        ...

    async def connect(self, host: str, port: int) -> Channel:
        """Open a channel.

        Raises:
            ChannelError: nobody listens there.
        """
        ...

    def close(self) -> None:
        """Listen no more."""
        ...
