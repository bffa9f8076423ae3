"""Headers of safetensors files: 8 bytes of length, little-endian, then JSON, then the tensors."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sylvan.protocol.errors import ConfigError

_MAX_BYTES = 100_000_000
_POINTER = b"version "  # how a pointer of Git LFS begins; as a length it is beyond any file


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor: its type as the file spells it, its shape, and its bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> tuple[dict[str, TensorHeader], int]:
    """The tensors of a file by name, and where their bytes begin.

    Raises:
        ConfigError: the file cannot be read, is cut off or broken; names it, and the tensor if one
            is to blame.
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
    """The same of a file in memory, which `where` names in errors.

    Raises:
        ConfigError: see `read_header`.
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
