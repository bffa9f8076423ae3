"""Arrays as bytes: inline in a message, or by name of a file in shared memory.

Layout of the header, little endian: dtype code (u8), number of dimensions (u8), then each
dimension (u64). Inline, the raw elements follow; shared, the name of the file that holds them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.transport.api import MessageError

INLINE_MAX_BYTES = 64 << 10
MAX_ARRAY_BYTES = 4 << 30
_MAX_DIMS = 8
_DTYPES = tuple(
    np.dtype(name)
    for name in ("<i4", "<f4", "|b1", "|u1", "<i8", "<f8", "<u2", "<u4", "<u8", "<f2", "|i1", "<i2")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NAME = re.compile(r"a[0-9]{1,10}-[0-9]{1,20}\Z")

Array = np.ndarray[Any, np.dtype[Any]]


def pack(array: Array, store: SharedArrays | None) -> tuple[bool, bytes]:
    """Encode an array; return whether it went to the store, and the payload.

    Raises:
        MessageError: The dtype is not supported.
    """
    code = _CODES.get(array.dtype.newbyteorder("<"))
    if code is None or array.ndim > _MAX_DIMS:
        raise MessageError(f"an array of {array.dtype} with {array.ndim} dimensions cannot be sent")
    data = np.ascontiguousarray(array, _DTYPES[code])
    header = struct.pack(f"<BB{array.ndim}Q", code, array.ndim, *array.shape)
    if store is not None and data.nbytes > INLINE_MAX_BYTES:
        name = store.put(data)
        if name is not None:
            return True, header + name.encode()
    return False, header + data.tobytes()


def unpack(payload: bytes | memoryview, store: SharedArrays | None, *, shared: bool) -> Array:
    """Decode the result of `pack` into a new array.

    Raises:
        MessageError: The payload is malformed, or the file is missing.
    """
    view = memoryview(payload)
    dtype, shape, offset = _header(view)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_ARRAY_BYTES:
        raise MessageError(f"an array of {num_bytes} bytes is too large")
    body = view[offset:]
    if not shared:
        if len(body) != num_bytes:
            raise MessageError(f"an array of {num_bytes} bytes came with {len(body)}")
        return np.frombuffer(body, dtype).reshape(shape).copy()
    if store is None:
        raise MessageError("an array in shared memory came where there is none")
    return store.take(bytes(body), num_bytes).view(dtype).reshape(shape)


def _header(view: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    if len(view) < 2 or view[0] >= len(_DTYPES) or view[1] > _MAX_DIMS:
        raise MessageError("the header of an array is malformed")
    offset = 2 + 8 * view[1]
    if len(view) < offset:
        raise MessageError("the header of an array is cut short")
    return _DTYPES[view[0]], struct.unpack(f"<{view[1]}Q", view[2:offset]), offset


class SharedArrays:
    """Large arrays, one file each in a private memory-backed directory.

    The reader deletes the file. Names start with the writer's PID, so that leftovers of a dead
    process can be found.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def put(self, array: Array) -> str | None:
        """Write a contiguous array; None if there is no space."""
        name = f"a{os.getpid()}-{next(self._numbers)}"
        path = self._directory / name
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = array.reshape(-1).view(np.uint8).data
                while len(view):
                    view = view[file.write(view) :]
        except OSError:
            path.unlink(missing_ok=True)
            return None
        return name

    def take(self, name: bytes, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read and delete the file of that name and size.

        Raises:
            MessageError: It is not one of ours, is missing, or has another size.
        """
        text = name.decode("ascii", "replace")
        if not _NAME.match(text):
            raise MessageError(f"{text!r} does not name a shared array")
        path = self._directory / text
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb", buffering=0) as file:
                path.unlink(missing_ok=True)
                found = os.fstat(file.fileno()).st_size
                if found != num_bytes:
                    raise MessageError(f"shared array {text} has {found} bytes, not {num_bytes}")
                return np.fromfile(file, np.uint8, num_bytes)
        except OSError as error:
            raise MessageError(f"shared array {text} cannot be read: {error.strerror}") from error
