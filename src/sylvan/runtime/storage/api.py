"""The interface of a store of KV pages. Stores know names and bytes; what these mean is ours.

A name is `SPACE/DIGEST.KIND`: 16 hex digits that stand for a namespace (a tenant, an adapter), the
64 of a digest chained over the whole prefix, and what is kept: `kv`, the window group `w0`, ..., or
the recurrent `state` after the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.errors import SylvanError

_NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}\.[a-z][a-z0-9]{0,7}")


Buffer = bytearray | memoryview
"""Writable bytes, in one piece."""


class StoreError(SylvanError):
    """A store is unreachable, refuses, or is full. The caller computes instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """How much a store may keep.

    Attributes:
        max_bytes: In all; None: as much as there is room for. What was not used for longest goes
            first.
        space_bytes: Of one namespace.
        ttl_s: A page that was not used for so long is forgotten.
        timeout_s: After which a call that waits for another machine fails, unless the URL says so.
    """

    max_bytes: int | None = None
    space_bytes: int | None = None
    ttl_s: float | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class StoredPage:
    """What a store tells of a page; `used_s` in seconds since 1970, 0 where it is not known."""

    name: str
    num_bytes: int
    used_s: float = 0.0


class PageStore(Protocol):
    """Keeps records under names. Any number of threads and processes may use the same store.

    Every call may block, and may raise StoreError. A record that was written is read as a whole, or
    what is read is found out to be wrong by its checksum: a store need not promise more.
    """

    def read_manifest(self) -> bytes | None:
        """What `write_manifest` of any process left."""
        ...

    def write_manifest(self, manifest: bytes) -> bytes:
        """Bind the store, if nobody did before; returns what it is bound to now."""
        ...

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        """Which of these are there; they count as used now."""
        ...

    def read(self, name: str) -> bytes | None:
        """A record; None if it is not there, or not any more."""
        ...

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        """Fill `parts`, one after another, with the start of a record; returns its whole size.

        None if it is not there, or not any more. `spread` is enough for a store that brings bytes.
        """
        ...

    def write(self, name: str, record: bytes) -> None:
        """Keep a record, dropping others if need be; another one under that name is replaced."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Forget these, if they are there."""
        ...

    def pages(self) -> Iterator[StoredPage]:
        """All records."""
        ...

    def sweep(self) -> int:
        """Remove what is past its time or left over from processes that died; how many things."""
        ...

    def clear(self) -> None:
        """Forget all records, and what the store was bound to."""
        ...

    def close(self) -> None:
        """No call follows."""
        ...


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What a module of `backends`, or an entry point, offers.

    Attributes:
        open: Opens the store at a URL; raises StoreError if it cannot be reached, ConfigError if
            the URL or the limits make no sense.
        check: The same without reaching out: whether URL and limits can be served at all.
    """

    open: Callable[[str, StoreLimits], PageStore]
    check: Callable[[str, StoreLimits], None] = lambda url, limits: None


def is_name(text: str) -> bool:
    """Whether a text is the name of a page."""
    return _NAME.fullmatch(text) is not None


def space_of(name: str) -> str:
    """The namespace of a page."""
    return name.partition("/")[0]


def kind_of(name: str) -> str:
    """What a page is: `kv`, `w0`, ..., `state`."""
    return name.rpartition(".")[2]


def spread(record: bytes | memoryview | None, parts: Sequence[Buffer]) -> int | None:
    """Copy the start of a record into parts, one after another; its size."""
    if record is None:
        return None
    at, whole = 0, memoryview(record)
    for part in parts:
        piece = whole[at : at + len(part)]
        part[: len(piece)] = piece
        at += len(piece)
    return len(record)
