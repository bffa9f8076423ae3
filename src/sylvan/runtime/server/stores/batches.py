"""Files and batches in SQLite, so that they outlive the process."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvan.protocol.errors import CapacityError

log = logging.getLogger(__name__)

UNFINISHED = ("in_progress", "finalizing", "cancelling")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  created_at INTEGER NOT NULL, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
  state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS items (
  batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT NOT NULL,
  status INTEGER, response TEXT, PRIMARY KEY (batch, line)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file; its content is read apart."""

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a batch. `status` is None until it has been answered."""

    line: int
    custom_id: str
    body: str
    status: int | None = None
    response: str | None = None


class BatchStore:
    """The database; may be called from any thread.

    Every method raises CapacityError while the database cannot be written or read: with status 507
    where there is no room, else 503.

    Args:
        folder: Where it lies; None keeps it in memory, until the process ends.
    """

    def __init__(self, folder: str | None) -> None:
        path = ":memory:"
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            path = str(Path(folder) / "batches.sqlite")
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        with self._transaction() as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def add_file(self, file: StoredFile, content: bytes) -> None:
        """Store a file."""
        row = (file.id, file.tenant, file.filename, file.purpose, file.created_at, content)
        with self._transaction() as db:
            db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)

    def file(self, name: str, tenant: str) -> StoredFile | None:
        """A file of the tenant."""
        found = self._files("id = ? AND tenant = ?", (name, tenant))
        return found[0] if found else None

    def files(self, tenant: str, purpose: str | None) -> list[StoredFile]:
        """The files of the tenant, the latest first."""
        if purpose is None:
            return self._files("tenant = ?", (tenant,))
        return self._files("tenant = ? AND purpose = ?", (tenant, purpose))

    def content(self, name: str) -> bytes:
        """The content of a file; empty if it is gone."""
        with self._transaction() as db:
            row = db.execute("SELECT content FROM files WHERE id = ?", (name,)).fetchone()
        return row[0] if row else b""

    def bytes_of(self, tenant: str) -> int:
        """How much the tenant has stored."""
        query = "SELECT COALESCE(SUM(LENGTH(content)), 0) FROM files WHERE tenant = ?"
        with self._transaction() as db:
            return db.execute(query, (tenant,)).fetchone()[0]

    def delete_file(self, name: str) -> None:
        """Forget a file."""
        with self._transaction() as db:
            db.execute("DELETE FROM files WHERE id = ?", (name,))

    def save_batch(self, tenant: str, state: dict[str, Any], items: Sequence[Item] = ()) -> None:
        """Store the state of a batch, and its requests if it is new."""
        row = (state["id"], tenant, state["status"], state["created_at"], json.dumps(state))
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", row)
            db.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, NULL, NULL)",
                [(state["id"], item.line, item.custom_id, item.body) for item in items],
            )

    def batch(self, name: str, tenant: str) -> dict[str, Any] | None:
        """The state of a batch of the tenant."""
        query = "SELECT state FROM batches WHERE id = ? AND tenant = ?"
        with self._transaction() as db:
            row = db.execute(query, (name, tenant)).fetchone()
        return json.loads(row[0]) if row else None

    def batches(self, tenant: str) -> list[dict[str, Any]]:
        """The batches of the tenant, the latest first."""
        query = "SELECT state FROM batches WHERE tenant = ? ORDER BY created_at DESC, id DESC"
        with self._transaction() as db:
            return [json.loads(row[0]) for row in db.execute(query, (tenant,))]

    def unfinished(self) -> list[tuple[str, dict[str, Any]]]:
        """Tenant and state of every batch that is to be worked on, the oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT tenant, state FROM batches WHERE status IN ({marks}) ORDER BY created_at"
        with self._transaction() as db:
            return [(tenant, json.loads(text)) for tenant, text in db.execute(query, UNFINISHED)]

    def items(self, batch: str, *, answered: bool) -> list[Item]:
        """The requests of a batch that have, or have not, been answered."""
        condition = "status IS NOT NULL" if answered else "status IS NULL"
        query = f"SELECT line, custom_id, body, status, response FROM items WHERE batch = ? AND {condition} ORDER BY line"  # noqa: E501
        with self._transaction() as db:
            return [Item(*row) for row in db.execute(query, (batch,))]

    def counts(self, batch: str) -> tuple[int, int, int]:
        """How many requests a batch has, how many were answered, and how many failed."""
        query = (
            "SELECT COUNT(*), COUNT(status), COALESCE(SUM(status >= 400), 0) FROM items "
            "WHERE batch = ?"
        )
        with self._transaction() as db:
            return db.execute(query, (batch,)).fetchone()

    def answer(self, batch: str, line: int, status: int, response: str) -> None:
        """Store the answer to a request."""
        query = "UPDATE items SET status = ?, response = ? WHERE batch = ? AND line = ?"
        with self._transaction() as db:
            db.execute(query, (status, response, batch, line))

    def _files(self, condition: str, values: tuple[str, ...]) -> list[StoredFile]:
        query = f"SELECT id, tenant, filename, purpose, created_at, LENGTH(content) FROM files WHERE {condition} ORDER BY created_at DESC, id DESC"  # noqa: E501
        with self._transaction() as db:
            return [StoredFile(*row) for row in db.execute(query, values)]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            log.warning("files and batches cannot be stored: %s", error)
            full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            why = "there is no room left" if full else str(error)
            message = f"Files and batches cannot be stored now: {why}."
            raise CapacityError(message, status=507 if full else 503) from error
