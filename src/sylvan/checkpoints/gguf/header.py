"""Reads the header of a GGUF file: metadata, and the location of each tensor.

Format: "GGUF", version, counts of tensors and of metadata; each metadata entry as key, type and
value; each tensor as name, sizes (innermost first), type and offset; then the tensors, aligned.
Every length is checked against the file size before memory of that length is allocated.
Source: ggml's docs/gguf.md, version 3 (version 2 differs in byte order only).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from sylvan.checkpoints.gguf.quants import Quant, quant_of
from sylvan.protocol.errors import ConfigError

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor: `shape` outermost first, `start` counts from the start of `file`."""

    name: str
    quant: Quant
    shape: tuple[int, ...]
    start: int
    stop: int
    file: Path


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata of a file, and the tensors of all its parts."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredArray]


PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")
"""Pattern of part names: stem, number from 1 on, count."""
_MAX_PARTS = 10_000


def read_model(file: Path) -> Header:
    """Read the header of a model from one file, or from all parts if this is the first part.

    Raises:
        ConfigError: As for `read_header`; or a part is missing, or repeats a tensor.
    """
    first = read_header(file)
    count, name = first.metadata.get("split.count", 1), PART.match(file.name)
    if not isinstance(count, int) or count <= 1:
        return first
    if name is None or int(name[2]) != 1 or int(name[3]) != count or count > _MAX_PARTS:
        raise ConfigError(
            f"{str(file)!r} is the first of {count} parts, so it should be called "
            f"NAME-00001-of-{count:05}.gguf, with the others beside it"
        )
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = file.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise ConfigError(f"{str(part)!r} is missing, which is part {number} of {count}")
        more = read_header(part).tensors
        if twice := next(iter(more.keys() & tensors.keys()), None):
            raise ConfigError(f"{str(part)!r} has the tensor {twice!r}, as another part has")
        tensors |= more
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ConfigError(f"the parts of {str(file)!r} have {len(tensors)} tensors, not {wanted}")
    return Header(file, first.metadata, tensors)


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        ConfigError: The file is not GGUF, is truncated, or has an unsupported number type.
    """
    try:
        with file.open("rb") as stream, _mapped(stream) as data:
            return _Reader(file, data).read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as GGUF: {error}") from None


def _mapped(stream: BinaryIO) -> mmap.mmap:
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


class _Reader:
    """Parses bytes sequentially; `_at` is the offset of the next value."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0

    def read(self) -> Header:
        if self._bytes(4) != b"GGUF":
            raise ConfigError(f"{str(self._file)!r} is not a GGUF file")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ConfigError(f"{str(self._file)!r} is GGUF version {version}; 2 and 3 can be read")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        self._expect(num_tensors * 24 + num_values * 12)
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{str(self._file)!r}: general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        return Header(self._file, metadata, {e.name: self._placed(e, base) for e in entries})

    def _entry(self) -> StoredArray:
        name, dims = self._string(), self._number("<I")
        if not 1 <= dims <= _MAX_DIMENSIONS:
            raise ConfigError(f"{str(self._file)!r}: tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(dims)]))
        quant = quant_of(self._number("<I"), f"{str(self._file)!r}: tensor {name!r}")
        if shape[-1] % quant.block or 0 in shape:
            raise ConfigError(
                f"{str(self._file)!r}: tensor {name!r} has shape {list(shape)}, which {quant.name} "
                f"in blocks of {quant.block} cannot have"
            )
        start = self._number("<Q")
        size = math.prod(shape) // quant.block * quant.num_bytes
        return StoredArray(name, quant, shape, start, start + size, self._file)

    def _placed(self, entry: StoredArray, base: int) -> StoredArray:
        stop = base + entry.stop
        if stop > len(self._data):
            raise ConfigError(
                f"{str(self._file)!r} is cut off: tensor {entry.name!r} ends at byte {stop}, but "
                f"the file has {len(self._data)}"
            )
        return replace(entry, start=base + entry.start, stop=stop)

    def _value(self, kind: int) -> Value:
        if kind != _ARRAY:
            return self._scalar(kind)
        inner, length = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            content = self._bytes(length * struct.calcsize(code))
            return list(struct.unpack(f"<{length}{code[1]}", content))
        self._expect(length * 8)
        return [self._scalar(inner) for _ in range(length)]

    def _scalar(self, kind: int) -> Scalar:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        raise ConfigError(f"{str(self._file)!r} holds a metadata value of unknown type {kind}")

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

    def _bytes(self, count: int) -> bytes:
        self._expect(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _expect(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ConfigError(f"{str(self._file)!r} is cut off: its header continues after its end")
