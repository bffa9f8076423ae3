"""An SQLite database of one process, with room set aside for deleting on a full disk."""

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
    """The database; may be called from any thread.

    Its file is its owner's alone, and belongs to one process at a time. The journal keeps its room,
    and holds only pages that were in use: what was deleted can be written over on a full disk.

    Args:
        folder: Where it lies; None keeps it in memory, until the process ends.
        name: Of its file.
        schema: Statements that make its tables, unless they are there.

        faults: What goes wrong with the disk.

    Raises:
        ConfigError: The folder cannot be used, or another server uses it.
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
            self._db.execute("PRAGMA user_version=1")  # takes the lock
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
        """What `work` returns, of which all or nothing is stored.

        Args:
            work: Statements; may be called twice.
            frees: It makes room, or is small: it may use what is set aside.

        Raises:
            CapacityError: The database cannot be read or written: with status 507 where there is
                no room, else 503.
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
            why = "there is no room left" if _is_full(error) else str(error)
            message = f"Files and batches cannot be stored now: {why}."
            raise CapacityError(message, status=507 if _is_full(error) else 503) from error
        finally:
            if frees:
                self._set_aside()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, self._db:
            if self._faults is not None:
                self._faults.inflict(self._db)
            return work(self._db)

    def _release(self) -> bool:
        """Give back the room that is set aside; whether there was some."""
        try:
            if self._reserve is None or not self._reserve.stat().st_size:
                return False
            os.truncate(self._reserve, 0)
        except OSError:
            return False
        return True

    def _set_aside(self) -> None:
        """Have room for deleting; without it deleting may need help from outside."""
        if self._reserve is None:
            return
        try:
            size = self._reserve.stat().st_size if self._reserve.exists() else 0
            if size < RESERVE_BYTES:
                self._reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError as error:
            log.warning("no room can be set aside for deleting: %s", error)
            self._release()


def _make_private(folder: Path, file: Path) -> None:
    """Have a file that nobody else reads; SQLite gives its journals the same mode."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    file.chmod(0o600)


def _is_full(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL
