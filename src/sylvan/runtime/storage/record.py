"""The record of one page in a store: a self-describing header, a checksum, and the bytes.

Layout, little-endian: magic `SYKV`, version, flags, 2 zero bytes, the first 16 bytes of the
manifest's identity, XXH3-128 of the name, length of the payload (8 bytes), XXH3-64 over all of the
header before it and the payload (8 bytes), payload.
"""

from __future__ import annotations

import struct
from typing import Literal

import xxhash

from sylvan.runtime.storage.cipher import Cipher

Fault = Literal["torn", "foreign", "stale", "sealed"]
"""Why a record is rejected: truncated or changed; not a page, or another page; of another manifest;
encrypted with another key, or unexpectedly plain."""

_HEAD = struct.Struct("<4sBBH16s16sQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _SUM.size
_MAGIC, _VERSION, _SEALED = b"SYKV", 1, 1


class RecordError(Exception):
    """A record is invalid.

    Attributes:
        fault: The reason.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class RecordCodec:
    """Encodes and decodes records of one manifest.

    Args:
        identity: `Manifest.identity`.
        cipher: Encrypts payloads; None: they are stored unencrypted.
    """

    def __init__(self, identity: bytes, cipher: Cipher | None = None) -> None:
        self._identity, self._cipher = identity[:16], cipher

    def encode(self, name: str, payload: bytes | memoryview) -> bytes:
        """Return the record of a page."""
        flags = 0
        if self._cipher is not None:
            flags = _SEALED
            payload = self._cipher.seal(payload, name.encode())
        head = _HEAD.pack(_MAGIC, _VERSION, flags, 0, self._identity, _digest(name), len(payload))
        return b"".join((head, _SUM.pack(_checksum(head, payload)), payload))

    @property
    def sealed(self) -> bool:
        """Whether payloads are encrypted."""
        return self._cipher is not None

    def check(self, name: str, head: bytearray, payload: memoryview, num_bytes: int) -> None:
        """Check an unencrypted record of `num_bytes` whose parts were read.

        Raises:
            RecordError: It is not that page, complete and unchanged.
        """
        if num_bytes < HEADER_BYTES:
            raise RecordError("torn", f"{name} has {num_bytes} bytes")
        flags, length = _shape(head, name)
        if length != num_bytes - HEADER_BYTES:
            raise RecordError("torn", f"{name} was cut short or changed")
        if flags & _SEALED:
            raise RecordError("sealed", f"{name} is encrypted")
        if length != len(payload):
            raise RecordError("foreign", f"{name} has {length} bytes, not {len(payload)}")
        _, identity = _parse(name, bytes(head), payload)
        if identity != self._identity:
            raise RecordError("stale", f"{name} was computed by another model or version")

    def decode(self, name: str, record: bytes) -> memoryview:
        """Return the bytes of a page.

        Raises:
            RecordError: It is not that page, complete and unchanged.
        """
        payload, flags, identity = _open(record, name)
        if identity != self._identity:
            raise RecordError("stale", f"{name} was computed by another model or version")
        if self._cipher is None:
            if flags & _SEALED:
                raise RecordError("sealed", f"{name} is encrypted")
            return payload
        if not flags & _SEALED:
            raise RecordError("sealed", f"{name} is not encrypted")
        opened = self._cipher.open(payload, name.encode())
        if opened is None:
            raise RecordError("sealed", f"{name} was encrypted with another key")
        return memoryview(opened)


def check_record(name: str, record: bytes, identity: bytes | None) -> None:
    """Check a record without its encryption key; with an identity, also check its manifest.

    Raises:
        RecordError: It is not that page, complete and unchanged.
    """
    _, _, found = _open(record, name)
    if identity is not None and found != identity[:16]:
        raise RecordError("stale", f"{name} was computed by another model or version")


def _open(record: bytes, name: str) -> tuple[memoryview, int, bytes]:
    """Return payload, flags and identity of a valid record."""
    if len(record) < HEADER_BYTES:
        raise RecordError("torn", f"{name} has {len(record)} bytes")
    payload = memoryview(record)[HEADER_BYTES:]
    flags, identity = _parse(name, record[:HEADER_BYTES], payload)
    return payload, flags, identity


def _shape(head: bytes | bytearray, name: str) -> tuple[int, int]:
    """Return the flags in a header, and the length of the payload after it."""
    magic, version, flags, _, _, _, length = _HEAD.unpack_from(head)
    if magic != _MAGIC or version != _VERSION:
        raise RecordError("foreign", f"{name} is not a page of format {_VERSION}")
    return flags, length


def _parse(name: str, head: bytes, payload: memoryview) -> tuple[int, bytes]:
    """Return flags and identity in a page's header, which is verified with its payload."""
    flags, length = _shape(head, name)
    _, _, _, _, identity, digest, _ = _HEAD.unpack_from(head)
    (checksum,) = _SUM.unpack_from(head, _HEAD.size)
    if len(payload) != length or checksum != _checksum(head[: _HEAD.size], payload):
        raise RecordError("torn", f"{name} was cut short or changed")
    if digest != _digest(name):
        raise RecordError("foreign", f"{name} holds another page")
    return flags, identity


def _digest(name: str) -> bytes:
    return xxhash.xxh3_128_digest(name.encode())


def _checksum(head: bytes, payload: bytes | memoryview) -> int:
    found = xxhash.xxh3_64(head)
    found.update(payload)
    return found.intdigest()
