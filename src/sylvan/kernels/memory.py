"""Memory for kernels: aligned, zeroed, and backed by huge pages if it is large.

Memory becomes resident when it is first touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_ALIGN = 64
_MAPPED = 512 << 10
"""Smallest size with a mapping of its own: what lives long leaves no holes among temporaries."""
_LARGE = 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the module mmap does not name
SLACK = 256  # bytes past the end that vector loads may touch


def allocate(num_bytes: int) -> Bytes:
    """Zeroed bytes, aligned to 64, followed by readable slack.

    Raises:
        MemoryError: The system has too little memory; names the number of bytes.
    """
    if num_bytes < _MAPPED:
        raw = np.zeros(num_bytes + _ALIGN + SLACK, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + num_bytes]
    try:
        region = _map(num_bytes + SLACK)
    except OSError as error:
        raise MemoryError(f"the system refuses {num_bytes:,} bytes ({error.strerror})") from error
    if num_bytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8, num_bytes)


def release_pages(memory: Bytes) -> int:
    """Return the whole pages of `memory` to the system; they read as zeros afterwards.

    The addresses stay valid: writing makes them resident again.

        Returns: The size of these pages in bytes, whether or not they were resident.

    Raises:
        OSError: The system does not support it.
    """
    page = mmap.PAGESIZE
    start = -(-memory.ctypes.data // page) * page
    stop = (memory.ctypes.data + memory.nbytes) // page * page
    if not hasattr(mmap, "MADV_DONTNEED") or sys.platform != "linux":
        raise OSError("memory can be released on Linux only")
    memory[: max(0, start - memory.ctypes.data)] = 0
    if stop <= start:
        memory[:] = 0
        return 0
    memory[stop - memory.ctypes.data :] = 0
    if error := _madvise(start, stop - start, mmap.MADV_DONTNEED):
        raise OSError(error, "madvise failed")
    return stop - start


def make_resident(address: int, num_bytes: int) -> bool:
    """Make the whole pages in a piece of memory resident now, not on first write.

    Contents stay unchanged, and other threads may write at the same time. Blocks without the GIL.

    Returns: False if the system cannot (Linux before 5.14) or has no memory left.
    """
    page = mmap.PAGESIZE
    start, stop = -(-address // page) * page, (address + num_bytes) // page * page
    if sys.platform != "linux":
        return False
    return stop <= start or not _madvise(start, stop - start, _POPULATE_WRITE)


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """Call madvise; return 0, or the system's error number."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return ctypes.get_errno() if advise(address, num_bytes, advice) else 0


def _map(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    # shared memory, which is the default, gets no huge pages on most systems
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
