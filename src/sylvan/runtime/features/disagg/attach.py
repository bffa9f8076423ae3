"""Cross-memory attach: the kernel copies between two processes of one user on one machine."""

from __future__ import annotations

import ctypes
import os
import secrets

import msgspec
import numpy as np

from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.features.disagg.remote_memory import Pieces, RemoteReadError

_BEACON_BYTES = 32
_MAX_PIECES = 1024  # IOV_MAX of Linux
_MAX_BYTES = 1 << 30  # limit of one call; the kernel stops below 2 GiB


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process, and a beacon in its memory that proves it is the right one."""

    pid: int
    address: int
    beacon: bytes


class Attach:
    """Implements `RemoteReader` by `process_vm_readv` of Linux."""

    name = "attach"
    local = True

    def __init__(self) -> None:
        self._beacon = np.frombuffer(secrets.token_bytes(_BEACON_BYTES), np.uint8).copy()

    def offer(self) -> bytes:
        found = _Offer(os.getpid(), self._beacon.ctypes.data, self._beacon.tobytes())
        return msgspec.msgpack.encode(found)

    def connect(self, offer: bytes) -> AttachedPeer:
        """Find the process by its beacon, whatever its PID is in this namespace."""
        try:
            found = msgspec.msgpack.decode(offer, type=_Offer)
        except MALFORMED as error:
            raise RemoteReadError(f"a malformed offer: {error}") from None
        peer = AttachedPeer(found.pid)
        seen = np.zeros(_BEACON_BYTES, np.uint8)
        at = np.array([seen.ctypes.data]), np.array([found.address]), np.array([_BEACON_BYTES])
        peer.read(at)
        if seen.tobytes() != found.beacon:
            raise RemoteReadError(f"process {found.pid} is another one here")
        return peer

    def close(self) -> None:
        pass


class AttachedPeer:
    """Implements `Peer`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (
            ctypes.c_int,
            *(ctypes.c_void_p, ctypes.c_ulong),
            *(ctypes.c_void_p, ctypes.c_ulong),
            ctypes.c_ulong,
        )

    def read(self, pieces: Pieces) -> None:
        local, remote, sizes = pieces
        here, there = np.stack([local, sizes], 1), np.stack([remote, sizes], 1)  # iovec records
        start = 0
        while start < len(sizes):
            stop = start + _batch(sizes[start : start + _MAX_PIECES].tolist())
            want = int(sizes[start:stop].sum())
            count = ctypes.c_ulong(stop - start)
            mine, theirs = here[start:].ctypes.data, there[start:].ctypes.data
            got = self._read(self._pid, mine, count, theirs, count, 0)
            if got != want:
                why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {want} bytes"
                raise RemoteReadError(f"memory of process {self._pid} cannot be read: {why}")
            start = stop


def _batch(sizes: list[int]) -> int:
    """Return how many of the next pieces fit into one call."""
    total = 0
    for count, size in enumerate(sizes):
        if count and total + size > _MAX_BYTES:
            return count
        total += size
    return len(sizes)
