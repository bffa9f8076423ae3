"""Byte arrays in one file, read by several threads into one piece of memory. Loads no torch.

Layout: magic and header length (8 bytes each), the header as JSON, then the body from the next
multiple of 4096 on. In the body each array is aligned to 4096 bytes, small ones to 64.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from sylvan.kernels.memory import Bytes, allocate

MAGIC = b"SYLPACK1"
_PAGE, _LINE = 4096, 64
_CHUNK = 32 << 20
_THREADS = 4
_MAX_HEADER = 64 << 20
_PART = ".part"


class BlobError(Exception):
    """The file is malformed; the message says why."""


class _Header(msgspec.Struct, frozen=True):
    """The header: `places[i]` is the offset and size of array i, in bytes."""

    about: Any
    places: list[tuple[int, int]]
    size: int
    sums: list[int]  # checksums of the body's chunks


@dataclass(frozen=True, slots=True)
class Blob:
    """The contents of a file: its description, and its arrays, which are writable.

    `digest` is that of the header, which has the arrays' checksums, so it identifies the contents.
    """

    about: Any
    arrays: Sequence[Bytes]
    digest: str = ""


def write_blob(
    path: Path,
    about: Mapping[str, Any],
    arrays: Sequence[Bytes],
    ended: Callable[[], bool] = lambda: False,
) -> int:
    """Write a file atomically; return its size in bytes.

    Args:
        path: File to write. An existing file is replaced atomically; open readers keep the old one.
        about: Description of the contents, JSON values.
        arrays: Contiguous arrays. If they change meanwhile, the file counts as damaged.
        ended: Called before each array; stops the write when true.

    Raises:
        OSError: The file cannot be written, `ended` was true (`errno.ECANCELED`), or another
          process is writing it (`errno.EBUSY`).
    """
    places, size = _places(arrays)
    sums = _sums(arrays, places, size)
    header = _Header(dict(about), places, size, sums)
    first = msgspec.json.encode(header)
    start = _start(len(first))
    with _draft(path) as file:
        file.write(MAGIC + len(first).to_bytes(8, "little") + first)
        for (offset, _), array in zip(places, arrays, strict=True):
            if ended():
                raise OSError(errno.ECANCELED, "the server ends", str(path))
            file.seek(start + offset)
            file.write(array.data)
        file.truncate(start + size)
    return start + size


def is_unfinished(path: Path) -> bool:
    """Whether `write_blob` began this file, and its process ended before it was complete."""
    if not path.name.startswith(".") or path.suffix != _PART:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is being written, or has just been completed
        return False
    return True


@contextmanager
def _draft(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` at the end; locked while it is written."""
    draft = path.with_name(f".{path.name}{_PART}")
    with os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(path) from None
        if not draft.exists() or not os.path.samestat(os.fstat(file.fileno()), draft.stat()):
            raise _busy(path)  # another process completed or deleted it before we had the lock
        finished = False
        try:
            file.truncate(0)
            yield file
            file.flush()
            draft.replace(path)
            finished = True
        finally:
            if not finished:
                draft.unlink(missing_ok=True)


def _busy(path: Path) -> OSError:
    return OSError(errno.EBUSY, "another process is writing it", str(path))


def read_blob(path: Path) -> Blob:
    """Read a file into new memory.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read.
        BlobError: The file is damaged, or has another format.
        MemoryError: There is too little memory.
    """
    with path.open("rb", buffering=0) as file:
        header, start, digest = _header(file.fileno(), path)
        body = allocate(header.size)
        chunks = range(0, header.size, _CHUNK)
        if len(chunks) != len(header.sums):
            raise BlobError(f"{path.name} is damaged: {len(header.sums)} checksums")

        def fill(number: int) -> bool:
            part = body.data[chunks[number] : chunks[number] + _CHUNK]
            done = 0
            while done < len(part):
                got = os.preadv(file.fileno(), [part[done:]], start + chunks[number] + done)
                if not got:
                    return False
                done += got
            return xxhash.xxh3_64_intdigest(part) == header.sums[number]

        if len(chunks) <= 1:
            right = all(map(fill, range(len(chunks))))
        else:
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
                right = all(threads.map(fill, range(len(chunks))))
        if not right:
            raise BlobError(f"{path.name} is damaged: a checksum is wrong")
    return Blob(header.about, [body[at : at + size] for at, size in header.places], digest)


def blob_digest(path: Path) -> str:
    """Return the `Blob.digest` of a file by reading its header only.

    Raises:
        OSError: it cannot be read.
        BlobError: it is of another format.
    """
    with path.open("rb", buffering=0) as file:
        return _header(file.fileno(), path)[2]


def _header(descriptor: int, path: Path) -> tuple[_Header, int, str]:
    """The header, where the body begins, and the digest of the header."""
    first = os.pread(descriptor, 16, 0)
    length = int.from_bytes(first[8:], "little")
    if first[:8] != MAGIC or length > _MAX_HEADER:
        raise BlobError(f"{path.name} has another format")
    text = os.pread(descriptor, length, 16)
    try:
        header = msgspec.json.decode(text, type=_Header)
    except (msgspec.DecodeError, msgspec.ValidationError, json.JSONDecodeError) as error:
        raise BlobError(f"{path.name} is damaged: header: {error}") from None
    start = _start(length)
    if os.fstat(descriptor).st_size != start + header.size:
        raise BlobError(f"{path.name} is truncated")
    if any(at < 0 or size < 0 or at + size > header.size for at, size in header.places):
        raise BlobError(f"{path.name} is damaged: an array ends after the file")
    return header, start, xxhash.xxh3_128_hexdigest(text)


def _start(header_bytes: int) -> int:
    return -(-(16 + header_bytes) // _PAGE) * _PAGE


def _places(arrays: Sequence[Bytes]) -> tuple[list[tuple[int, int]], int]:
    places: list[tuple[int, int]] = []
    end = 0
    for array in arrays:
        step = _PAGE if array.nbytes >= _PAGE else _LINE
        start = -(-end // step) * step
        places.append((start, array.nbytes))
        end = start + array.nbytes
    return places, end


def _sums(arrays: Sequence[Bytes], places: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Checksums of the body's chunks; gaps between arrays count as zeros."""
    found: list[int] = []
    state, at = xxhash.xxh3_64(), 0

    def take(part: memoryview | bytes) -> None:
        nonlocal state, at
        while len(part):
            room = _CHUNK - at % _CHUNK
            state.update(part[:room])
            at += len(part[:room])
            part = part[room:]
            if at % _CHUNK == 0:
                found.append(state.intdigest())
                state = xxhash.xxh3_64()

    for (offset, _), array in zip(places, arrays, strict=True):
        take(bytes(offset - at))
        take(array.data)
    if at % _CHUNK:
        found.append(state.intdigest())
    assert at == size
    return found
