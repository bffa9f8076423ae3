"""Reads pages with Mooncake's transfer engine, over its TCP transport.

The library is `mooncake-transfer-engine` (or `mooncake-transfer-engine-non-cuda`); its module
`mooncake.engine` is described at https://kvcache-ai.github.io/Mooncake/.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from sylvan.runtime.features.disagg.remote_memory import Pieces, RemoteReadError


class Mooncake:
    """Implements `RemoteReader`. Sessions are named host:port by the engine's own handshake."""

    name = "mooncake"
    local = False

    def __init__(self, memory: Sequence[tuple[int, int]], host: str) -> None:
        """Start the engine, and register the memory of all pages.

        Raises:
            ImportError: The library is not installed.
            RemoteReadError: It rejects the memory.
        """
        library: Any = importlib.import_module("mooncake.engine")
        self._engine: Any = library.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise RemoteReadError("the transfer engine of mooncake does not start")
        self._memory = tuple(memory)
        for address, size in memory:
            if self._engine.register_memory(address, size):
                raise RemoteReadError("mooncake does not register the memory of KV")
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    def offer(self) -> bytes:
        return self._session.encode()

    def connect(self, offer: bytes) -> MooncakePeer:
        """Make a peer; the first read connects."""
        return MooncakePeer(self._engine, offer.decode("ascii", "replace"))

    def close(self) -> None:
        for address, _ in self._memory:
            self._engine.unregister_memory(address)


class MooncakePeer:
    """Implements `Peer`."""

    def __init__(self, engine: Any, session: str) -> None:
        self._engine, self._session = engine, session

    def read(self, pieces: Pieces) -> None:
        given = (part.tolist() for part in pieces)
        if status := self._engine.batch_transfer_sync_read(self._session, *given):
            raise RemoteReadError(f"mooncake could not read from {self._session}: status {status}")
