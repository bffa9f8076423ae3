"""Ordered messages between two servers over any transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]

Place = Callable[[bytes, int], Sequence[Buffer]]
"""Returns the buffers for a message's payload, given the message and the payload's size."""

MAX_MESSAGE = 1 << 20
"""Largest message without its payload, in bytes."""


class ChannelError(Exception):
    """The peer is gone, or violates the protocol."""


class Channel(Protocol):
    """One connection, used from its owner's event loop; one sender and one receiver at a time.

    Each message arrives once, in order and unchanged, or the channel fails.
    """

    @property
    def same_machine(self) -> bool:
        """Whether both ends are on the same machine."""
        ...

    async def send(self, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message; the buffers of `payload` are concatenated.

        Returns when `payload` may be changed again; waits while the peer does not read.

        Raises:
            ChannelError: The peer is gone.
        """
        ...

    async def receive(
        self, limit: int = 0, place: Place | None = None
    ) -> tuple[bytes, Sequence[Buffer]]:
        """Receive the next message with its payload of at most `limit` bytes, in one new buffer.

        With `place`, the payload is written into the buffers that `place` returns.

        Raises:
            ChannelError: The peer is gone, or the data is not a message.
        """
        ...

    def close(self) -> None:
        """Close the connection; idempotent."""
        ...


Serve = Callable[[Channel], Awaitable[None]]


class Network(Protocol):
    """Creates channels."""

    async def listen(self, host: str, port: int, serve: Serve) -> int:
        """Run `serve` as a task for each incoming channel; return the port.

        Raises:
            OSError: The address cannot be used.
        """
        ...

    async def connect(self, host: str, port: int) -> Channel:
        """Open a channel.

        Raises:
            ChannelError: Nothing listens there.
        """
        ...

    def close(self) -> None:
        """Stop listening."""
        ...
