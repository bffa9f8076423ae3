"""Reads pages from another process's memory: a single copy, made by the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.core.memory import PageMemory

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Local addresses, remote addresses, and sizes: arrays of equal length."""

Where = tuple[tuple[int, int, int], ...]
"""The regions of page 0 of one KV group: (address, stride, bytes)."""

WHERE = "where"
"""Key among the offers: the encoded result of `where`."""

HTTP_PORT = "http"
"""Key among the offers: the HTTP port of the prefill server, in digits."""


class RemoteReadError(Exception):
    """The other process's memory cannot be read by this mechanism."""


class Peer(Protocol):
    """Another process whose memory can be read."""

    def read(self, pieces: Pieces) -> None:
        """Copy all pieces; blocks, and releases the GIL.

        Raises:
            RemoteReadError: The process is gone, or refuses.
        """
        ...


class RemoteReader(Protocol):
    """A mechanism to read other processes' memory. Used from one thread at a time."""

    name: str
    local: bool  # works within one machine only

    def offer(self) -> bytes:
        """Return what another process needs to read the pages of this one."""
        ...

    def connect(self, offer: bytes) -> Peer:
        """Connect to the process that made an offer.

        Raises:
            RemoteReadError: Its memory cannot be read by this mechanism.
        """
        ...

    def close(self) -> None:
        """Withdraw the offer."""
        ...


def where(memory: Sequence[PageMemory]) -> tuple[Where, ...]:
    """Return the memory layout of all KV groups."""
    return tuple(
        tuple((r.address, r.stride, r.num_bytes) for r in part.regions(0)) for part in memory
    )


def extents(memory: Sequence[PageMemory]) -> tuple[tuple[int, int], ...]:
    """Return address and size of each memory region with pages, to register them."""
    found: list[tuple[int, int]] = []
    for part in memory:
        for region in part.regions(0):
            last = region.address + region.stride * (part.num_pages - 1)
            found.append((region.address, last + region.num_bytes - region.address))
    return tuple(found)


def pieces(ours: Where, mine: Sequence[int], theirs: Where, others: Sequence[int]) -> Pieces:
    """Return the copies that turn local pages `mine` into the remote pages `others`.

    Pages that are adjacent on both sides become one copy.

    Raises:
        RemoteReadError: The layouts differ.
    """
    if [region[2] for region in ours] != [region[2] for region in theirs]:
        raise RemoteReadError("pages have another layout there")
    here, there = np.array(mine, np.int64), np.array(others, np.int64)
    local = np.concatenate([a + here * stride for a, stride, _ in ours])
    remote = np.concatenate([a + there * stride for a, stride, _ in theirs])
    size = np.repeat(np.array([region[2] for region in ours], np.int64), len(here))
    joins = (local[1:] == local[:-1] + size[:-1]) & (remote[1:] == remote[:-1] + size[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~joins])) if len(size) else np.empty(0, np.intp)
    sums = np.add.reduceat(size, starts) if len(size) else size
    return local[starts], remote[starts], sums


def read_where(data: bytes) -> tuple[Where, ...]:
    """Decode the result of `where`.

    Raises:
        RemoteReadError: It is malformed.
    """
    try:
        return msgspec.msgpack.decode(data, type=tuple[Where, ...])
    except MALFORMED as error:
        raise RemoteReadError(f"a malformed offer: {error}") from None
