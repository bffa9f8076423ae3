"""The two files of an adapter as bytes: whole regular files of a bounded size, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError


def read_bounded(path: Path, most_bytes: int, bound: str) -> NDArray[np.uint8]:
    """The contents of a regular file, which is not waited for.

    It is read, not mapped: a file that is cut while it is read is then a short one, not a SIGBUS.

    Args:
        path: Where it lies.
        most_bytes: It may have.
        bound: What errors call `most_bytes`.

    Raises:
        ConfigError: it is not there, no regular file, or larger.
    """
    try:
        # a pipe would be waited for
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"cannot read {str(path)!r}: it is no regular file")
            if found.st_size > most_bytes:
                raise ConfigError(
                    f"{str(path)!r} has {found.st_size:,} bytes; at most {most_bytes:,} are read "
                    f"({bound})"
                )
            with os.fdopen(fd, "rb", closefd=False) as file:
                return np.fromfile(file, np.uint8, found.st_size)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
