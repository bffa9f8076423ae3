"""Reads an adapter's files: regular files of bounded size, read as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError


def read_bounded(path: Path, max_bytes: int, bound: str) -> NDArray[np.uint8]:
    """Read a regular file; never block on anything else, such as a pipe.

    Reads instead of mapping, so a file that is truncated meanwhile cannot cause SIGBUS.

    Args:
        path: The file.
        max_bytes: Maximum size.
        bound: Name of `max_bytes` in errors.

    Raises:
        ConfigError: the file is missing, not regular, or too large.
    """
    try:
        # opening a pipe would block
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"cannot read {str(path)!r}: it is not a regular file")
            if found.st_size > max_bytes:
                raise ConfigError(
                    f"{str(path)!r} has {found.st_size:,} bytes; at most {max_bytes:,} are read "
                    f"({bound})"
                )
            with os.fdopen(fd, "rb", closefd=False) as file:
                return np.fromfile(file, np.uint8, found.st_size)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
