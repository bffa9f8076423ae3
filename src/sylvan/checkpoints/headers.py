"""Headers of safetensors files: 8 bytes of length, little-endian, then JSON, then the tensors."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sylvan.protocol.errors import ConfigError

_MAX_BYTES = 100_000_000
_POINTER = b"version "  # start of a Git LFS pointer; as a header length it exceeds any file


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor: its dtype as in the file, its shape, and its byte range after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> tuple[dict[str, TensorHeader], int]:
    """Read the tensors of a file by name, and the offset of the data.

    Raises:
        ConfigError: The file cannot be read, is truncated or malformed; names it, and the tensor
            if there is one.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = stream.read(min(length, _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from None
    if prefix == _POINTER:
        raise ConfigError(
            f"{str(file)!r} is a pointer of Git LFS, not the weights; `git lfs pull` fetches them"
        )
    if len(prefix) < 8 or len(text) < length <= _MAX_BYTES:
        there = len(prefix) + len(text)
        raise ConfigError(f"{str(file)!r} is cut off: it ends after {there:,} bytes, in its header")
    return _entries(text if length <= _MAX_BYTES else b"", str(file)), 8 + length


def read_header_of(data: memoryview, where: str) -> tuple[dict[str, TensorHeader], int]:
    """`read_header` for a file in memory, which errors call `where`.

    Raises:
        ConfigError: As for `read_header`.
    """
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if len(data) < 8 or len(data) - 8 < length:
        raise ConfigError(f"{where!r} is not a safetensors file, or its header is truncated")
    return _entries(bytes(data[8 : 8 + min(length, _MAX_BYTES)]), where), 8 + length


def _entries(text: bytes, where: str) -> dict[str, TensorHeader]:
    header = _parse(text)
    if header is None:
        raise ConfigError(f"{where!r} is not a safetensors file, or its header is malformed")
    names = (name for name in header if name != "__metadata__")
    return {name: _entry(name, where, header[name]) for name in names}


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _entry(name: str, where: str, found: Any) -> TensorHeader:
    try:
        dtype, shape = str(found["dtype"]), tuple(int(n) for n in found["shape"])
        start, stop = (int(n) for n in found["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where!r}: cannot read the entry of tensor {name!r}") from None
    if not 0 <= start <= stop or min(shape, default=0) < 0:
        raise ConfigError(f"{where!r}: impossible place or shape of tensor {name!r}")
    return TensorHeader(dtype, shape, start, stop)
