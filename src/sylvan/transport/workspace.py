"""The private directory of one engine: sockets and shared arrays, and its removal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.01
_PREFIX = "sylvan-"
_LOCK = "lock"
_MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 107 on Linux and 103 on macOS


def _default_parent() -> Path:
    # memory-backed, so that shared arrays never touch a disk
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    parent = memory if usable else Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) < _MAX_SOCKET_PATH - 32 else Path("/tmp")


class Workspace:
    """A directory of mode 0700 that lives as long as its owner.

    The owner holds a file lock in it. If the lock is free, the owner has exited in whatever
    way, and the next engine to start removes the directory.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, lock_fd: int | None) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, parent: Path | None = None) -> Workspace:
        """Create a directory under `parent` (default: in shared memory) and own it.

        Removes directories left behind there by killed engines first.
        """
        parent = parent or _default_parent()
        sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # renamed only after locking: a sweep never sees a free lock of a living owner
        draft = path / f"{_LOCK}.new"
        lock_fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path / _LOCK)
        return cls(path, lock_fd)

    @classmethod
    def join(cls, path: Path) -> Workspace:
        """Use the directory of another process."""
        return cls(path, None)

    def address(self, name: str) -> str:
        """Return the ZeroMQ address of the socket called `name`."""
        return f"ipc://{self.path / name}"

    def sweep_arrays(self, pid: int) -> None:
        """Delete shared arrays written by process `pid` that no process will read."""
        for file in self.path.glob(f"a{pid}-*"):
            file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the directory and its contents; idempotent.

        Other processes may delete it or write to it concurrently.
        """
        for _ in range(_REMOVE_TRIES):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(_REMOVE_PAUSE_S)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def sweep(parent: Path) -> int:
    """Delete the directories under `parent` whose owners have exited; return their number."""
    removed = 0
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            removed += _remove_orphan(path)
    return removed


def _remove_orphan(path: Path) -> bool:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return False
    lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the owner is alive
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock_fd)
    return True
