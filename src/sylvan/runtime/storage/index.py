"""An SQLite index of a directory: which pages exist, their sizes, and when they were last used.

Page files describe themselves; the index only makes finding the oldest fast. It may
be out of date: a file without an entry does not exist, and an entry without a file
is removed when it is read.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sylvan.runtime.storage.api import StoredPage

_BUSY_S = 10.0  # seconds to wait for another process's write lock
_RETRY_S = 0.005
_NOTE_S = 5.0
_ASKED = 500  # names per query; SQLite supports at least 999 parameters
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    name TEXT PRIMARY KEY, space TEXT NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON pages (used);
CREATE INDEX IF NOT EXISTS by_space ON pages (space, used);
CREATE TABLE IF NOT EXISTS spaces (space TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON pages BEGIN
    INSERT INTO spaces VALUES (new.space, new.bytes)
        ON CONFLICT DO UPDATE SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF bytes ON pages BEGIN
    UPDATE spaces SET bytes = bytes + new.bytes - old.bytes WHERE space = new.space;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON pages BEGIN
    UPDATE spaces SET bytes = bytes - old.bytes WHERE space = old.space;
END;
"""


class PageIndex:
    """Shared by threads and processes.

    All methods raise sqlite3.Error when the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._db, self._lock = _connect(path), threading.Lock()
        self._used: dict[str, float] = {}  # not written yet
        self._noted_s = 0.0
        _use_wal(self._db)
        self._db.execute("PRAGMA synchronous = OFF")  # the index can be rebuilt
        self._db.executescript(_SCHEMA)
        # readers must not wait for a thread that waits for another process
        self._reader, self._reading = _connect(path), threading.Lock()

    def close(self) -> None:
        """Close the index; no call follows."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):  # loses only when pages were used
                self._note(busy_s=0.0)
            self._db.close()
        with self._reading:
            self._reader.close()

    def add(self, name: str, space: str, num_bytes: int, now_s: float) -> None:
        """Record a written page."""
        self._run(
            "INSERT INTO pages VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET bytes = excluded.bytes, used = excluded.used",
            (name, space, num_bytes, now_s),
        )

    def use(self, names: Sequence[str], now_s: float, ttl_s: float | None) -> set[str]:
        """Return which of these exist and have not expired; counts as a use.

        Lookups never wait for writers. Uses are written in batches, at most
        every `_NOTE_S` seconds, and later if the database is locked or the disk full.
        """
        since = -1.0 if ttl_s is None else now_s - ttl_s
        found: set[str] = set()
        with self._reading:
            for start in range(0, len(names), _ASKED):
                some = names[start : start + _ASKED]
                marks = ",".join("?" * len(some))
                rows = self._reader.execute(
                    f"SELECT name, used FROM pages WHERE name IN ({marks})",
                    tuple(some),
                )
                found.update(
                    name for name, used in rows if max(used, self._used.get(name, used)) >= since
                )
        self._used.update(dict.fromkeys(found, now_s))
        if now_s - self._noted_s >= _NOTE_S and self._lock.acquire(blocking=False):
            self._noted_s = now_s
            try:
                with contextlib.suppress(sqlite3.Error):
                    self._note(busy_s=0.0)
            finally:
                self._lock.release()
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Record that pages are gone."""
        with self._lock, self._change():
            for name in names:
                self._used.pop(name, None)
                self._db.execute("DELETE FROM pages WHERE name = ?", (name,))

    def oldest(self, space: str | None, count: int) -> list[tuple[str, int]]:
        """Yield (name, bytes) of the least recently used pages, of one namespace or of all."""
        if space is None:
            rows = self._rows("SELECT name, bytes FROM pages ORDER BY used LIMIT ?", (count,))
        else:
            rows = self._rows(
                "SELECT name, bytes FROM pages WHERE space = ? ORDER BY used LIMIT ?",
                (space, count),
            )
        return [(str(name), int(size)) for name, size in rows]

    def expired(self, before_s: float) -> list[str]:
        """Return pages not used since a time."""
        rows = self._rows("SELECT name FROM pages WHERE used < ?", (before_s,))
        return [str(name) for (name,) in rows]

    def num_bytes(self, space: str | None = None) -> int:
        """Return the size of one namespace or of all."""
        if space is None:
            rows = self._rows("SELECT COALESCE(SUM(bytes), 0) FROM spaces", ())
        else:
            rows = self._rows("SELECT bytes FROM spaces WHERE space = ?", (space,))
        return int(rows[0][0]) if rows else 0

    def pages(self) -> Iterator[StoredPage]:
        """Yield all pages, ordered by name."""
        last = ""
        while rows := self._rows(
            "SELECT name, bytes, used FROM pages WHERE name > ? ORDER BY name LIMIT 1000", (last,)
        ):
            for name, size, used in rows:
                yield StoredPage(str(name), int(size), float(used))
            last = str(rows[-1][0])

    def _note(self, busy_s: float = _BUSY_S) -> None:
        """Write the recorded uses; needs the lock."""
        used, self._used = self._used, {}
        if not used:
            return
        self._db.execute(f"PRAGMA busy_timeout = {int(1000 * busy_s)}")
        try:
            with self._change():
                self._db.executemany(
                    "UPDATE pages SET used = ? WHERE name = ? AND used < ?",
                    ((at, name, at) for name, at in used.items()),
                )
        except sqlite3.Error:
            self._used = used | self._used
            raise
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_S)}")

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Run a transaction; needs the lock."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _run(self, statement: str, values: Sequence[object]) -> None:
        with self._lock:
            self._db.execute(statement, tuple(values))

    def _rows(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock:
            self._note()
            return self._db.execute(statement, tuple(values)).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to WAL mode, in which readers do not wait for writers.

    SQLite's own timeout does not cover this statement: without waiting here, two servers that open
    a new store at once would fail to start.

    Raises:
        sqlite3.Error: Other processes keep the file locked, or it is unusable.
    """
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return
