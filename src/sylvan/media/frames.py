"""Framed messages on a pipe: a length (u64, little endian), then that many bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _LENGTH.size


def read_frame(source: BinaryIO) -> bytes | None:
    """Read the next message; None at the end."""
    head = source.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return None
    [size] = _LENGTH.unpack(head)
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Write a message."""
    sink.write(header(len(data)))
    sink.write(data)
    sink.flush()


def header(size: int) -> bytes:
    """Encode the header of a message of that many bytes."""
    return _LENGTH.pack(size)


def length(head: bytes) -> int:
    """Decode the number of bytes that follow."""
    [size] = _LENGTH.unpack(head)
    return size
