"""What passes between the two halves. Nothing here is a tensor."""

from __future__ import annotations

import msgspec

from sylvan.protocol.arrays import IntArray


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Compute the KV of `ids`, the first of which is at position `start`, into these pages."""

    job: int
    start: int
    ids: IntArray
    pages: IntArray


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Compute nothing more of a job; it is over then."""

    job: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Go on with what is under way."""


MuxWork = tuple[Fill | Stop | Advance, ...]


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """The KV of a job is there."""

    job: int


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """After `Stop`: nothing is written any more. `error`: why a job could not be computed."""

    job: int
    error: str = ""


MuxEvents = tuple[Filled | Stopped, ...]
