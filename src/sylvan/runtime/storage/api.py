"""The interface of a KV store, which maps names to bytes; callers define their meaning.

A name is `SPACE/DIGEST.KIND`: 16 hex digits for a namespace (a tenant, an adapter), the 64 of a
digest chained over the whole prefix, and the kind of data: `kv`, the window group `w0`, ..., or
the recurrent `state` after the prefix. Of several ranks, `r` and the rank follow: `kvr0`, `kvr1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.errors import SylvanError

_NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}\.[a-z][a-z0-9]{0,7}")


Buffer = bytearray | memoryview
"""A contiguous writable buffer."""


class StoreError(SylvanError):
    """A store is unreachable, rejects a call, or is full. The caller recomputes instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """Limits of a store.

    Attributes:
        max_bytes: Total size; None: unlimited. The least recently used pages are evicted
            first.
        space_bytes: Size of one namespace.
        ttl_s: Pages not used for this long expire.
        timeout_s: Timeout of calls to another machine, unless the URL sets one.
    """

    max_bytes: int | None = None
    space_bytes: int | None = None
    ttl_s: float | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Metadata of a page; `used_s` is a Unix time, 0 if unknown."""

    name: str
    num_bytes: int
    used_s: float = 0.0


class PageStore(Protocol):
    """Stores records by name. Any number of threads and processes may share a store.

    Every call may block, and may raise StoreError. A reader sees a complete record, or its checksum
    fails: a store need not guarantee more.
    """

    def read_manifest(self) -> bytes | None:
        """Return what any process passed to `write_manifest`."""
        ...

    def write_manifest(self, manifest: bytes) -> bytes:
        """Bind the store, if it is not bound yet; return what it is bound to."""
        ...

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        """Return which of these exist; counts as a use."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a record; None if it does not exist any more."""
        ...

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        """Read the start of a record into consecutive `parts`; return the record's size.

        None if it does not exist any more. Stores that return bytes can use `spread`.
        """
        ...

    def write(self, name: str, record: bytes) -> None:
        """Write a record, replacing one of that name, and evicting others if needed."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete these records, if they exist."""
        ...

    def pages(self) -> Iterator[StoredPage]:
        """Yield all records."""
        ...

    def sweep(self) -> int:
        """Remove expired pages and leftovers of dead processes; return their number."""
        ...

    def clear(self) -> None:
        """Delete all records and the manifest."""
        ...

    def close(self) -> None:
        """Close the store; no call follows."""
        ...


@dataclass(frozen=True, slots=True)
class StoreKind:
    """Exports of a module of `backends`, or of an entry point.

    Attributes:
        open: Opens the store at a URL; raises StoreError if it is unreachable, ConfigError if
            the URL or the limits are invalid.
        check: Checks URL and limits without connecting.
    """

    open: Callable[[str, StoreLimits], PageStore]
    check: Callable[[str, StoreLimits], None] = lambda url, limits: None


def is_name(text: str) -> bool:
    """Whether a text is a page name."""
    return _NAME.fullmatch(text) is not None


def space_of(name: str) -> str:
    """Return the namespace of a page."""
    return name.partition("/")[0]


def kind_of(name: str) -> str:
    """Return the kind of a page: `kv`, `w0`, ..., `state`; with ranks, and whose it is."""
    return name.rpartition(".")[2]


def spread(record: bytes | memoryview | None, parts: Sequence[Buffer]) -> int | None:
    """Copy the start of a record into consecutive parts; return its size."""
    if record is None:
        return None
    at, whole = 0, memoryview(record)
    for part in parts:
        piece = whole[at : at + len(part)]
        part[: len(piece)] = piece
        at += len(piece)
    return len(record)
