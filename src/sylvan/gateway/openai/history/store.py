"""Stores responses and conversations in SQLite, in memory or in a file."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from sylvan.config.route import ProvidersConfig
from sylvan.gateway.observe.metrics import HistoryMetrics
from sylvan.protocol.errors import CapacityError, ConfigError
from sylvan.utils.clock import Clock
from sylvan.utils.threads import call_in_thread

log = logging.getLogger(__name__)

Kind = Literal["response", "conversation"]
Item = dict[str, Any]
T = TypeVar("T")

BUSY_S = 5.0
"""Longest wait for another process's write lock, in seconds."""
DAY_S = 86400.0
_UNFINISHED = "status IN ('queued', 'in_progress')"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    kept_at REAL NOT NULL,
    status TEXT NOT NULL,
    maker TEXT NOT NULL,
    reply BLOB NOT NULL,
    items BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (kind, owner, id)
);
CREATE INDEX IF NOT EXISTS by_age ON records (kept_at);
CREATE INDEX IF NOT EXISTS by_owner ON records (owner, bytes);
PRAGMA user_version = 1;
"""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A response or conversation.

    Attributes:
        reply: The object as clients see it.
        items: Input of this and all earlier turns, or the items of a conversation, oldest
            first.
    """

    reply: Item
    items: list[Item]


class HistoryStore:
    """Responses and conversations of all owners; each owner sees only its own.

    When there are too many or they are too large, the oldest objects of the owner with the most
    bytes are evicted. Several processes may share the store if it is a file.

    Args:
        config: Location and limits.
        metrics: Prometheus metrics.
        wall: Wall clock, in seconds since the Unix epoch.
        maker: Name of this process among those that share the store; stable across restarts.

    Raises:
        ConfigError: The file is unusable.
    """

    def __init__(
        self, config: ProvidersConfig, metrics: HistoryMetrics, wall: Clock, maker: str
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._wall = wall
        self._maker = maker
        self._lock = threading.Lock()
        path = ":memory:" if config.history == "memory" else _private(config.history_file)
        try:
            self._db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(
                f"UPDATE records SET status = 'lost' WHERE maker = ? AND {_UNFINISHED}", (maker,)
            )
            self._db.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"providers.history_file={path} cannot be used: {error}") from error
        metrics.connections.labels(config.history).set(1)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
        self._metrics.connections.labels(self._config.history).set(0)

    async def put(
        self,
        kind: Kind,
        owner: str,
        reply: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store an object; replaces the owner's object with the same ID.

        Raises:
            CapacityError: It cannot be stored now.
        """
        shown, given = orjson.dumps(reply), orjson.dumps(items)
        size = len(shown) + len(given)
        if size > self._config.history_max_bytes:
            limit = self._config.history_max_bytes
            message = f"{size} bytes are too many to be kept (providers.history_max_bytes={limit})."
            raise CapacityError(message, status=507)
        row = (kind, owner, reply["id"], self._wall(), reply.get("status", ""), self._maker)

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, shown, given, size),
            )
            self._shrink(db)

        await self._run(f"put_{kind}", work)

    async def get(self, kind: Kind, owner: str, name: str) -> StoredItem | None:
        """Return the owner's object with an ID.

        Raises:
            CapacityError: It cannot be read now.
        """

        def work(db: sqlite3.Connection) -> StoredItem | None:
            self._forget_old(db)
            return _find(db, kind, owner, name)

        return await self._run(f"get_{kind}", work)

    async def replace_unfinished(self, owner: str, reply: Mapping[str, Any]) -> bool:
        """Replace an unfinished response; False if it is finished or missing."""
        shown = orjson.dumps(reply)

        def work(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                "UPDATE records SET reply = ?, status = ?, bytes = ? + length(items) "
                f"WHERE kind = 'response' AND owner = ? AND id = ? AND {_UNFINISHED}",
                (shown, reply["status"], len(shown), owner, reply["id"]),
            )
            self._shrink(db)
            return changed.rowcount > 0

        return await self._run("replace_response", work)

    async def describe(
        self, owner: str, name: str, changes: Mapping[str, Any]
    ) -> StoredItem | None:
        """Replace fields of a conversation; None if the owner has none with that ID."""

        def work(db: sqlite3.Connection) -> StoredItem | None:
            found = _find(db, "conversation", owner, name)
            if found is None:
                return None
            made = StoredItem({**found.reply, **changes}, found.items)
            _write(db, owner, made)
            return made

        return await self._run("update_conversation", work)

    async def rewrite(
        self, owner: str, name: str, change: Callable[[list[Item]], list[Item]]
    ) -> StoredItem | None:
        """Replace the items of a conversation with the result of `change`, atomically.

        Returns:
            The conversation with its new items; None if the owner has none with that ID.
        """

        def work(db: sqlite3.Connection) -> StoredItem | None:
            db.execute("BEGIN IMMEDIATE")  # no other process may add items in between
            found = _find(db, "conversation", owner, name)
            if found is None:
                return None
            made = StoredItem(found.reply, change(found.items))
            _write(db, owner, made)
            self._shrink(db)
            return made

        return await self._run("update_conversation", work)

    async def drop(self, kind: Kind, owner: str, name: str) -> bool:
        """Delete an object; False if the owner has none with that ID."""

        def work(db: sqlite3.Connection) -> bool:
            gone = db.execute(
                "DELETE FROM records WHERE kind = ? AND owner = ? AND id = ?", (kind, owner, name)
            )
            return gone.rowcount > 0

        return await self._run(f"delete_{kind}", work)

    async def _run(self, operation: str, work: Callable[[sqlite3.Connection], T]) -> T:
        kind, metrics = self._config.history, self._metrics
        result = "error"
        try:
            with metrics.duration.labels(kind, operation).time():
                found = await call_in_thread(self._locked, work)
            result = "success"
        except sqlite3.Error as error:
            log.warning("the history cannot be used: %s", error)
            raise CapacityError(f"The history cannot be used now: {error}.") from error
        finally:
            metrics.operations.labels(kind, operation, result).inc()
        return found

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, self._db:
            found = work(self._db)
            count = self._db.execute("SELECT COUNT(*) FROM records").fetchone()[0]
        self._metrics.items.labels(self._config.history).set(count)
        return found

    def _forget_old(self, db: sqlite3.Connection) -> None:
        days = self._config.retention_days
        if days is not None:
            limit = self._wall() - days * DAY_S
            db.execute("DELETE FROM records WHERE kept_at <= ?", (limit,))

    def _shrink(self, db: sqlite3.Connection) -> None:
        self._forget_old(db)
        config = self._config
        while True:
            count, size = db.execute("SELECT COUNT(*), TOTAL(bytes) FROM records").fetchone()
            if count <= config.history_entries and size <= config.history_max_bytes:
                return
            db.execute(
                "DELETE FROM records WHERE rowid = (SELECT rowid FROM records WHERE owner = "
                "(SELECT owner FROM records GROUP BY owner ORDER BY SUM(bytes) DESC LIMIT 1) "
                "ORDER BY kept_at, rowid LIMIT 1)"
            )


def _find(db: sqlite3.Connection, kind: Kind, owner: str, name: str) -> StoredItem | None:
    row = db.execute(
        "SELECT reply, items, status FROM records WHERE kind = ? AND owner = ? AND id = ?",
        (kind, owner, name),
    ).fetchone()
    if row is None:
        return None
    reply = orjson.loads(row[0])
    if row[2] == "lost":
        message = "The gateway stopped before the response was complete."
        reply |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return StoredItem(reply, orjson.loads(row[1]))


def _write(db: sqlite3.Connection, owner: str, kept: StoredItem) -> None:
    reply, items = orjson.dumps(kept.reply), orjson.dumps(kept.items)
    db.execute(
        "UPDATE records SET reply = ?, items = ?, bytes = ? "
        "WHERE kind = 'conversation' AND owner = ? AND id = ?",
        (reply, items, len(reply) + len(items), owner, kept.reply["id"]),
    )


def _private(file: str | None) -> str:
    """Return the path of a file with mode 0600; SQLite gives its journals the same mode."""
    if file is None:
        raise ConfigError("providers.history=sqlite needs providers.history_file")
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"providers.history_file={file} cannot be used: {error}") from error
    return str(path)
