"""Memory shared by two processes of one user, without a file that could outlive them."""

from __future__ import annotations

import mmap
import os
import re
import stat

import numpy as np

from sylvan.runtime.features.disagg.channel import Buffer

_NAME = "sylvan-kv"
_PATH = re.compile(r"/proc/\d+/fd/\d+")


class SharedSegment:
    """Bytes mapped by both processes.

    Attributes:
        path: Path with which another process of this user opens it, while this one holds it.
    """

    def __init__(self, descriptor: int, num_bytes: int, path: str = "") -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, num_bytes)
        self.bytes: Buffer = np.frombuffer(self._map, np.uint8)
        self.path = path

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """Allocate shared memory.

        Raises:
            OSError: The system has none.
        """
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes, f"/proc/{os.getpid()}/fd/{descriptor}")
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str, num_bytes: int) -> SharedSegment:
        """Map memory that another process allocated.

        Raises:
            OSError: It does not exist, or is not shared memory.
        """
        if not _PATH.fullmatch(path) or not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("it is not shared memory")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_size(descriptor, num_bytes)
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unmap it; existing views of `bytes` keep the mapping alive."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.bytes = np.empty(0, np.uint8)


def _check_size(descriptor: int, num_bytes: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        raise OSError(f"it has {found.st_size} bytes, not {num_bytes}")
