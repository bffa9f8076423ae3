"""Transfer mechanisms by the name of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.attach import Attach
from sylvan.runtime.features.disagg.remote_memory import RemoteReader, RemoteReadError, extents

LIBRARIES = ("nixl", "mooncake")
"""Transfers that need an optional library."""


@dataclass(frozen=True, slots=True)
class TransferMechanisms:
    """Mechanisms to move pages, besides the connection itself.

    Attributes:
        readers: Mechanisms to read the prefill server's memory; the first that works is used.
        shares: Whether to use shared memory: always, never, or (None) if the other server is on
            this machine.
        needs_reader: Whether a prefill server whose memory cannot be read is rejected.
        http_port: The HTTP port of this server, to announce; 0: unknown.
    """

    readers: Sequence[RemoteReader] = ()
    shares: bool | None = None
    needs_reader: bool = False
    http_port: int = 0


def transfer_mechanisms(
    transfer: str, memory: Sequence[PageMemory], host: str
) -> TransferMechanisms:
    """Return the mechanisms of a transfer.

    Raises:
        ConfigError: Its library is not installed, or rejects this memory.
    """
    if transfer == "auto":
        return TransferMechanisms((Attach(),))
    if transfer == "shm":
        return TransferMechanisms((Attach(),), shares=True)
    if transfer not in LIBRARIES:
        return TransferMechanisms(shares=False)
    try:
        return TransferMechanisms(
            (_library(transfer, memory, host),), shares=False, needs_reader=True
        )
    except (ImportError, RemoteReadError) as error:
        raise ConfigError(f"disagg.transfer={transfer} cannot be used: {error}") from None


def _library(transfer: str, memory: Sequence[PageMemory], host: str) -> RemoteReader:
    pieces = extents(memory[:1])
    if transfer == "nixl":
        from sylvan.runtime.features.disagg.nixl import Nixl

        return Nixl(pieces)
    from sylvan.runtime.features.disagg.mooncake import Mooncake

    return Mooncake(pieces, "127.0.0.1" if host == "localhost" else host)
