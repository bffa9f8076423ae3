"""An SQLite database for one process, with space reserved for deletions on a full disk."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sylvan.protocol.errors import CapacityError, ConfigError
from sylvan.runtime.server.faults import DiskFaults

log = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 20

T = TypeVar("T")


class Database:
    """The database; thread-safe.

    Only its owner can read the file, and only one process can use it. The journal keeps its space
    and contains only pages in use, so deletions succeed on a full disk.

    Args:
        folder: Directory; None: in memory.
        name: File name.
        schema: SQL that creates its tables if they are missing.

        faults: Fault injection for the disk.

    Raises:
        ConfigError: The directory is unusable, or another server uses it.
    """

    def __init__(
        self, folder: str | None, name: str, schema: str, faults: DiskFaults | None = None
    ) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._reserve = None if folder is None else Path(folder) / f"{name}.reserve"
        path = ":memory:" if folder is None else str(Path(folder) / name)
        try:
            if folder is not None:
                _make_private(Path(folder), Path(path))
            self._db = sqlite3.connect(path, timeout=0, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=PERSIST")
            self._db.executescript(schema)
            self._db.execute("PRAGMA user_version=1")  # acquires the lock
        except (OSError, sqlite3.Error) as error:
            busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            why = "another server uses it" if busy else str(error)
            raise ConfigError(f"server.data_dir={folder} cannot be used: {why}") from error
        self._set_aside()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def run(self, work: Callable[[sqlite3.Connection], T], *, frees: bool = False) -> T:
        """Run `work` in a transaction, and return its result.

        Args:
            work: Executes statements; may be called twice.
            frees: It frees space or is small: it may use the reserved space.

        Raises:
            CapacityError: The database cannot be read or written: with status 507 if the disk is
                full, else 503.
        """
        try:
            try:
                return self._run(work)
            except sqlite3.OperationalError as error:
                if not (frees and _is_full(error) and self._release()):
                    raise
                return self._run(work)
        except sqlite3.OperationalError as error:
            log.warning("files and batches cannot be stored: %s", error)
            why = "the disk is full" if _is_full(error) else str(error)
            message = f"Files and batches cannot be stored now: {why}."
            raise CapacityError(message, status=507 if _is_full(error) else 503) from error
        finally:
            if frees:
                self._set_aside()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, self._db:
            if self._faults is not None:
                self._faults.before_transaction(self._db)
            return work(self._db)

    def _release(self) -> bool:
        """Release the reserved space; return whether there was any."""
        try:
            if self._reserve is None or not self._reserve.stat().st_size:
                return False
            os.truncate(self._reserve, 0)
        except OSError:
            return False
        return True

    def _set_aside(self) -> None:
        """Reserve space for deletions; without it they may fail on a full disk."""
        if self._reserve is None:
            return
        try:
            size = self._reserve.stat().st_size if self._reserve.exists() else 0
            if size < RESERVE_BYTES:
                self._reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError as error:
            log.warning("no space can be reserved for deletions: %s", error)
            self._release()


def _make_private(folder: Path, file: Path) -> None:
    """Create a file with mode 0600; SQLite gives its journals the same mode."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    file.chmod(0o600)


def _is_full(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL
