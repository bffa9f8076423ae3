"""Files and batches in SQLite, so that they survive restarts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.runtime.server.faults import DiskFaults
from sylvan.runtime.server.stores.database import Database

UNFINISHED = ("in_progress", "finalizing", "cancelling")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  created_at INTEGER NOT NULL, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
  state TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_age ON files (created_at);
CREATE INDEX IF NOT EXISTS batches_by_age ON batches (created_at);
CREATE TABLE IF NOT EXISTS items (
  batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT NOT NULL,
  status INTEGER, response TEXT, PRIMARY KEY (batch, line)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file; its content is read separately."""

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a batch. `status` is None until it was answered."""

    line: int
    custom_id: str
    body: str
    status: int | None = None
    response: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ItemAnswer:
    """The answer to one request of a batch."""

    batch: str
    line: int
    status: int
    response: str


class FileBatchStore:
    """Files; see `BatchStore`.

    Args:
        database: The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: StoredFile, content: bytes) -> None:
        """Add a file."""
        self._database.run(lambda db: _insert_file(db, file, content))

    def get(self, name: str, tenant: str) -> StoredFile | None:
        """Return a file of the tenant."""
        found = self._files("id = ? AND tenant = ?", (name, tenant))
        return found[0] if found else None

    def list(self, tenant: str, purpose: str | None) -> Sequence[StoredFile]:
        """List the tenant's files, newest first."""
        if purpose is None:
            return self._files("tenant = ?", (tenant,))
        return self._files("tenant = ? AND purpose = ?", (tenant, purpose))

    def content(self, name: str) -> bytes:
        """Return the content of a file; empty if it was deleted."""
        query = "SELECT content FROM files WHERE id = ?"
        row = self._database.run(lambda db: db.execute(query, (name,)).fetchone())
        return row[0] if row else b""

    def delete(self, name: str) -> None:
        """Delete a file."""
        query = "DELETE FROM files WHERE id = ?"
        self._database.run(lambda db: db.execute(query, (name,)), frees=True)

    def _files(self, condition: str, values: tuple[str, ...]) -> Sequence[StoredFile]:
        query = f"SELECT id, tenant, filename, purpose, created_at, LENGTH(content) FROM files WHERE {condition} ORDER BY created_at DESC, id DESC"  # noqa: E501
        rows = self._database.run(lambda db: db.execute(query, values).fetchall())
        return [StoredFile(*row) for row in rows]


class BatchStore:
    """Files, batches and their requests; thread-safe.

    Requests and answers are deleted once a batch has ended: its files contain them.

    Every method raises CapacityError while the database cannot be read or written: with status 507
    if the disk is full, else 503. Deletions and state changes use reserved space.

    Args:
        folder: Directory of the database; None: in memory.
        faults: Fault injection for the disk.

    Attributes:
        files: The files.

    Raises:
        ConfigError: The directory is unusable.
    """

    def __init__(self, folder: str | None, faults: DiskFaults | None = None) -> None:
        self._database = Database(folder, "batches.sqlite", _SCHEMA, faults)
        self.files = FileBatchStore(self._database)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes a tenant stores: files, and batches with their remaining requests."""
        files = "SELECT COALESCE(SUM(LENGTH(content)), 0) FROM files WHERE tenant = ?"
        batches = "SELECT COALESCE(SUM(LENGTH(state)), 0) FROM batches WHERE tenant = ?"
        items = (
            "SELECT COALESCE(SUM(LENGTH(body) + COALESCE(LENGTH(response), 0)), 0) FROM items "
            "WHERE batch IN (SELECT id FROM batches WHERE tenant = ?)"
        )
        queries = (files, batches, items)
        return self._database.run(
            lambda db: sum(db.execute(query, (tenant,)).fetchone()[0] for query in queries)
        )

    def add_batch(self, tenant: str, state: dict[str, Any], items: Sequence[Item] = ()) -> None:
        """Add a batch and its requests."""

        def add(db: sqlite3.Connection) -> None:
            _insert_batch(db, tenant, state)
            db.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, NULL, NULL)",
                [(state["id"], item.line, item.custom_id, item.body) for item in items],
            )

        self._database.run(add)

    def save_batch(self, tenant: str, state: dict[str, Any]) -> None:
        """Save the state of a batch."""
        self._database.run(lambda db: _insert_batch(db, tenant, state), frees=True)

    def end_batch(
        self, tenant: str, state: dict[str, Any], files: Sequence[tuple[StoredFile, bytes]]
    ) -> None:
        """Save the final state of a batch and its files, and delete its requests."""

        def end(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM items WHERE batch = ?", (state["id"],))
            for file, content in files:
                _insert_file(db, file, content)
            _insert_batch(db, tenant, state)

        self._database.run(end)

    def delete_batch(self, name: str) -> None:
        """Delete a batch; its files stay."""

        def delete(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM items WHERE batch = ?", (name,))
            db.execute("DELETE FROM batches WHERE id = ?", (name,))

        self._database.run(delete, frees=True)

    def expire(self, before: int) -> None:
        """Delete files and ended batches created before a time."""
        marks = ", ".join("?" * len(UNFINISHED))
        ended = f"SELECT id FROM batches WHERE created_at < ? AND status NOT IN ({marks})"
        wanted = (before, *UNFINISHED)

        def find(db: sqlite3.Connection) -> bool:
            old = "SELECT 1 FROM files WHERE created_at < ? LIMIT 1"
            return bool(
                db.execute(old, (before,)).fetchone()
                or db.execute(f"{ended} LIMIT 1", wanted).fetchone()
            )

        def delete(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM files WHERE created_at < ?", (before,))
            db.execute(f"DELETE FROM items WHERE batch IN ({ended})", wanted)
            db.execute(f"DELETE FROM batches WHERE id IN ({ended})", wanted)

        if self._database.run(find):
            self._database.run(delete, frees=True)

    def batch(self, name: str, tenant: str) -> dict[str, Any] | None:
        """Return the state of a tenant's batch."""
        query = "SELECT state FROM batches WHERE id = ? AND tenant = ?"
        row = self._database.run(lambda db: db.execute(query, (name, tenant)).fetchone())
        return json.loads(row[0]) if row else None

    def batches(self, tenant: str) -> list[dict[str, Any]]:
        """List the tenant's batches, newest first."""
        query = "SELECT state FROM batches WHERE tenant = ? ORDER BY created_at DESC, id DESC"
        rows = self._database.run(lambda db: db.execute(query, (tenant,)).fetchall())
        return [json.loads(row[0]) for row in rows]

    def unfinished(self) -> list[tuple[str, dict[str, Any]]]:
        """List the tenant and state of every unfinished batch, oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT tenant, state FROM batches WHERE status IN ({marks}) ORDER BY created_at"
        rows = self._database.run(lambda db: db.execute(query, UNFINISHED).fetchall())
        return [(tenant, json.loads(text)) for tenant, text in rows]

    def waiting(self, batch: str, after: int, limit: int) -> list[Item]:
        """Return the next unanswered requests of a batch after a line."""
        query = "SELECT line, custom_id, body, status, response FROM items WHERE batch = ? AND line > ? AND status IS NULL ORDER BY line LIMIT ?"  # noqa: E501
        rows = self._database.run(lambda db: db.execute(query, (batch, after, limit)).fetchall())
        return [Item(*row) for row in rows]

    def items(self, batch: str) -> list[Item]:
        """Return the requests of an unfinished batch."""
        query = "SELECT line, custom_id, body, status, response FROM items WHERE batch = ? ORDER BY line"  # noqa: E501
        rows = self._database.run(lambda db: db.execute(query, (batch,)).fetchall())
        return [Item(*row) for row in rows]

    def counts(self, batch: str) -> tuple[int, int, int]:
        """Count a batch's requests, those answered, and those failed."""
        query = (
            "SELECT COUNT(*), COUNT(status), COALESCE(SUM(status >= 400), 0) FROM items "
            "WHERE batch = ?"
        )
        return self._database.run(lambda db: db.execute(query, (batch,)).fetchone())

    def answer(self, answers: Sequence[ItemAnswer]) -> None:
        """Save the answers to requests of any batches; a second answer replaces the first."""
        query = "UPDATE items SET status = ?, response = ? WHERE batch = ? AND line = ?"
        rows = [(found.status, found.response, found.batch, found.line) for found in answers]
        self._database.run(lambda db: db.executemany(query, rows))


def _insert_file(db: sqlite3.Connection, file: StoredFile, content: bytes) -> None:
    row = (file.id, file.tenant, file.filename, file.purpose, file.created_at, content)
    db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)


def _insert_batch(db: sqlite3.Connection, tenant: str, state: dict[str, Any]) -> None:
    row = (state["id"], tenant, state["status"], state["created_at"], json.dumps(state))
    db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", row)
