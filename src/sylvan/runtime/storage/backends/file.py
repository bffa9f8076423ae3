"""A local directory with one file per page, and an index. Several servers may share it.

Pages are written to a temporary file and renamed, so a killed process leaves a file that is never
read. The page checksum detects what a power failure leaves behind.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import (
    Buffer,
    StoredPage,
    StoreError,
    StoreKind,
    StoreLimits,
    is_name,
    space_of,
)
from sylvan.runtime.storage.index import PageIndex
from sylvan.utils.clock import Clock, unix_time
from sylvan.utils.lock import locked

MANIFEST, INDEX, PAGES, INCOMING = "manifest.json", "index.sqlite3", "pages", "incoming"
_BATCH = 64  # pages evicted at a time
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class PageFiles(Protocol):
    """Reads and writes whole files. Errors are OSError, or StoreError."""

    def read_into(self, path: Path, parts: Sequence[Buffer]) -> int:
        """Read the start of a file into parts; return its size, or how much could be read."""
        ...

    def write(self, path: Path, record: bytes) -> None:
        """Write a file."""
        ...


class PlainFiles:
    """Implements `PageFiles` with system calls, without intermediate copies."""

    def read_into(self, path: Path, parts: Sequence[Buffer]) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size, room = os.fstat(descriptor).st_size, sum(map(len, parts))
            read = os.preadv(descriptor, [*parts], 0)
            return size if read == min(size, room) else read
        finally:
            os.close(descriptor)

    def write(self, path: Path, record: bytes) -> None:
        path.write_bytes(record)


class FileStore:
    """Implements `PageStore` in a directory."""

    def __init__(
        self,
        root: Path,
        limits: StoreLimits,
        clock: Clock = unix_time,
        files: PageFiles | None = None,
    ) -> None:
        """Create the directory if needed.

        Raises:
            StoreError: It cannot be created or used.
        """
        self._root, self._limits, self._clock = root, limits, clock
        self._files = files or PlainFiles()
        self._numbers = itertools.count()
        with _named(root):
            for folder in (root / PAGES, root / INCOMING):
                folder.mkdir(parents=True, exist_ok=True)
            self._index = PageIndex(root / INDEX)

    def read_manifest(self) -> bytes | None:
        try:
            with _named(self._root, passing=FileNotFoundError):
                return (self._root / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None

    def write_manifest(self, manifest: bytes) -> bytes:
        with _named(self._root), locked(self._root / ".lock"):
            found = self.read_manifest()
            if found is not None:
                return found
            incoming = self._incoming()
            incoming.write_bytes(manifest)
            incoming.replace(self._root / MANIFEST)
            return manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        with _named(self._root):
            found = self._index.use(names, self._clock(), self._limits.ttl_s)
        return [name in found for name in names]

    def read(self, name: str) -> bytes | None:
        try:
            with _named(self._root, passing=FileNotFoundError):
                return self._path(name).read_bytes()
        except FileNotFoundError:
            with _named(self._root):
                self._index.remove([name])
            return None

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        try:
            with _named(self._root, passing=FileNotFoundError):
                return self._files.read_into(self._path(name), parts)
        except FileNotFoundError:
            with _named(self._root):
                self._index.remove([name])
            return None

    def write(self, name: str, record: bytes) -> None:
        limits, incoming = self._limits, self._incoming()
        self._make_room(len(record), limits.max_bytes, None)
        self._make_room(len(record), limits.space_bytes, space_of(name))
        path = self._path(name)
        try:
            with _named(self._root):
                self._files.write(incoming, record)
                _rename(incoming, path)
                self._index.add(name, space_of(name), len(record), self._clock())
        except StoreError:
            incoming.unlink(missing_ok=True)
            raise

    def remove(self, names: Sequence[str]) -> None:
        with _named(self._root):
            self._index.remove(names)
            for name in names:
                self._path(name).unlink(missing_ok=True)

    def pages(self) -> Iterator[StoredPage]:
        with _named(self._root):
            yield from self._index.pages()

    def sweep(self) -> int:
        ttl, now = self._limits.ttl_s, self._clock()
        late = [] if ttl is None else self._index.expired(now - ttl)
        self.remove(late)
        return len(late) + self._remove_stale_files() + self._remove_unknown()

    def clear(self) -> None:
        with _named(self._root), locked(self._root / ".lock"):
            (self._root / MANIFEST).unlink(missing_ok=True)
            self._index.remove([page.name for page in self._index.pages()])
            shutil.rmtree(self._root / PAGES)
            (self._root / PAGES).mkdir()

    def close(self) -> None:
        self._index.close()

    def _path(self, name: str) -> Path:
        assert is_name(name), name
        space, _, rest = name.partition("/")
        return self._root / PAGES / space / rest[:2] / rest

    def _incoming(self) -> Path:
        """Return a name that no other process uses."""
        number, thread = next(self._numbers), threading.get_ident()
        return self._root / INCOMING / f"{os.getpid()}-{thread}-{number}"

    def _make_room(self, num_bytes: int, limit: int | None, space: str | None) -> None:
        """Evict the least recently used pages of one namespace, or of all, until this much fits."""
        if limit is None:
            return
        if num_bytes > limit:
            what = "tiers.max_bytes" if space is None else "tiers.namespace_bytes"
            raise StoreError(f"a page of {num_bytes} bytes does not fit into {what}={limit}")
        with _named(self._root):
            excess = self._index.num_bytes(space) + num_bytes - limit
            while excess > 0 and (oldest := self._index.oldest(space, _BATCH)):
                gone: list[str] = []
                for name, size in oldest:
                    gone.append(name)
                    excess -= size
                    if excess <= 0:
                        break
                self.remove(gone)

    def _remove_stale_files(self) -> int:
        """Remove temporary files of dead processes."""
        count = 0
        for path in (self._root / INCOMING).iterdir():
            pid = path.name.partition("-")[0]
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
                path.unlink(missing_ok=True)
                count += 1
        return count

    def _remove_unknown(self) -> int:
        """Remove files without an index entry, and entries without a file."""
        known = {page.name for page in self._index.pages()}
        pages = self._root / PAGES
        files = {f"{p.parent.parent.name}/{p.name}": p for p in pages.glob("*/*/*")}
        gone = [name for name in known if name not in files]
        self._index.remove(gone)
        # a file written a moment ago may not be in the index yet
        now_known = known | {page.name for page in self._index.pages()}
        old = self._clock() - 60.0
        unknown = [
            path
            for name, path in files.items()
            if name not in now_known and path.stat().st_mtime < old
        ]
        for path in unknown:
            path.unlink(missing_ok=True)
        return len(gone) + len(unknown)


def _rename(incoming: Path, path: Path) -> None:
    """Move a file into place, creating its directory if it is missing."""
    try:
        incoming.replace(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        incoming.replace(path)


@contextmanager
def _named(root: Path, passing: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Convert errors of the file system and SQLite to StoreError, naming the directory."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        what = "is full" if error.errno in _NO_ROOM else f"cannot be used: {error.strerror}"
        raise StoreError(f"{str(root)!r} {what}") from error
    except sqlite3.Error as error:
        raise StoreError(f"the index of {str(root)!r} cannot be used: {error}") from error


def directory_of(url: str) -> Path:
    """Return the directory that a URL or a path names.

    Raises:
        ConfigError: It names none.
    """
    if not url.lower().startswith("file:"):
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"tiers.storage={url}: a directory is written file:///absolute/path")
    return Path(unquote(parts.path)).expanduser().absolute()


def _check(url: str, limits: StoreLimits) -> None:
    root = directory_of(url)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"tiers.storage={url}: {str(root)!r} is not a directory")


def _open(url: str, limits: StoreLimits) -> FileStore:
    _check(url, limits)
    return FileStore(directory_of(url), limits)


STORE = StoreKind(open=_open, check=_check)
