"""How pages may move, by the name of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.attach import Attach
from sylvan.runtime.features.disagg.reach import ReachError, Way, extents

LIBRARIES = ("nixl", "mooncake")
"""Transfers that are carried out by a library which has to be installed."""


@dataclass(frozen=True, slots=True)
class Means:
    """How pages may move, apart from through the connection itself.

    Attributes:
        ways: To read the memory of the prefill server, best first; the first that works is taken.
        shares: Whether pages may go through shared memory: always, never, or (None) when the other
            server is on this machine.
        needs_way: Whether a prefill server that cannot be read is no use.
        http_port: Where a prefill server is asked over HTTP, to be told; 0: not known.
    """

    ways: Sequence[Way] = ()
    shares: bool | None = None
    needs_way: bool = False
    http_port: int = 0


def means(transfer: str, memory: Sequence[PageMemory], host: str) -> Means:
    """Of a transfer.

    Raises:
        ConfigError: its library is not installed, or refuses this memory.
    """
    if transfer == "auto":
        return Means((Attach(),))
    if transfer == "shm":
        return Means((Attach(),), shares=True)
    if transfer not in LIBRARIES:
        return Means(shares=False)
    try:
        return Means((_library(transfer, memory, host),), shares=False, needs_way=True)
    except (ImportError, ReachError) as error:
        raise ConfigError(f"disagg.transfer={transfer} cannot be used: {error}") from None


def _library(transfer: str, memory: Sequence[PageMemory], host: str) -> Way:
    pieces = extents(memory[:1])
    if transfer == "nixl":
        from sylvan.runtime.features.disagg.nixl import Nixl

        return Nixl(pieces)
    from sylvan.runtime.features.disagg.mooncake import Mooncake

    return Mooncake(pieces, "127.0.0.1" if host == "localhost" else host)
