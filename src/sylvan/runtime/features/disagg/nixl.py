"""Reads pages with NIXL through its UCX backend, which falls back to TCP.

The library is `nixl`; its module `nixl._api` is described at https://github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from sylvan.runtime.features.disagg.remote_memory import Pieces, RemoteReadError

_MAX_PEERS = 256
_POLL_S = 0.0002


class Nixl:
    """Implements `RemoteReader`: an agent with the memory of all pages registered."""

    name = "nixl"
    local = False

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        """Start the agent.

        Raises:
            ImportError: The library is not installed.
            RemoteReadError: It rejects the memory.
        """
        library: Any = importlib.import_module("nixl._api")
        settings = library.nixl_agent_config(backends=["UCX"])
        self._agent: Any = library.nixl_agent(f"sylvan-{secrets.token_hex(8)}", settings)
        pieces = [(address, size, 0, "kv") for address, size in memory]
        self._registered = self._agent.register_memory(pieces, "DRAM")
        if self._registered is None:
            raise RemoteReadError("nixl does not register the memory of KV")
        self._names: OrderedDict[bytes, str] = OrderedDict()  # other agents, by their offers
        self._lock = threading.Lock()

    def offer(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, offer: bytes) -> NixlPeer:
        with self._lock:
            name = self._names.get(offer)
            if name is None:
                try:
                    found = self._agent.add_remote_agent(offer)
                except RuntimeError as error:
                    raise RemoteReadError(f"nixl does not know that agent: {error}") from None
                name = self._names[offer] = found.decode() if isinstance(found, bytes) else found
            self._names.move_to_end(offer)
            while len(self._names) > _MAX_PEERS:
                self._agent.remove_remote_agent(self._names.popitem(last=False)[1])
        return NixlPeer(self._agent, name)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlPeer:
    """Implements `Peer`."""

    def __init__(self, agent: Any, name: str) -> None:
        self._agent, self._name = agent, name

    def read(self, pieces: Pieces) -> None:
        local, remote, sizes = pieces
        if not len(sizes):
            return
        device = np.zeros_like(sizes)
        agent = self._agent
        try:
            here = agent.get_xfer_descs(np.stack([local, sizes, device], 1), "DRAM")
            there = agent.get_xfer_descs(np.stack([remote, sizes, device], 1), "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._name)
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    time.sleep(_POLL_S)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
        except RuntimeError as error:
            raise RemoteReadError(f"nixl could not read from {self._name}: {error}") from None
        if state != "DONE":
            raise RemoteReadError(f"nixl could not read from {self._name}: {state}")
