"""Messages between the halves. They contain no tensors."""

from __future__ import annotations

import msgspec

from sylvan.protocol.arrays import IntArray


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Compute the KV of `ids`, starting at position `start`, into these pages."""

    job: int
    start: int
    ids: IntArray
    pages: IntArray


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop a job; it then reports its end."""

    job: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Continue the current jobs."""


MuxWork = tuple[Fill | Stop | Advance, ...]


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """The KV of a job is complete."""

    job: int


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Answer to `Stop`: nothing is written any more. `error`: why a job failed."""

    job: int
    error: str = ""


MuxEvents = tuple[Filled | Stopped, ...]
