"""A file lock between processes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path` inside the context; waits for it. The kernel frees it on exit."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
