"""Framing between processes, and the first message to a process with a grammar library."""

from __future__ import annotations

import struct
from typing import Protocol

import msgspec

from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary

MAX_FRAME_BYTES = 1 << 30

_LENGTH = struct.Struct("<I")


class Stream(Protocol):
    """A source of frames."""

    def read(self, size: int, /) -> bytes | None:
        """Read up to `size` bytes; empty at the end."""
        ...


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """First message: the library, the vocabulary, the limits."""

    backend: str
    tokens: list[bytes]
    special: dict[str, int]
    eos_ids: tuple[int, ...]
    limits: Limits


def preparation(backend: str, vocabulary: Vocabulary, limits: Limits) -> Prepare:
    """Build the first message to a process that runs `backend`."""
    return Prepare(
        backend=backend,
        tokens=list(vocabulary.tokens),
        special=vocabulary.special,
        eos_ids=vocabulary.eos_ids,
        limits=limits,
    )


def vocabulary_of(prepare: Prepare) -> Vocabulary:
    """Return the vocabulary, with a greedy encoder."""
    encode = GreedyEncoder(prepare.tokens, frozenset(prepare.special.values()))
    return Vocabulary(prepare.tokens, prepare.special, prepare.eos_ids, encode)


def frame(body: bytes) -> bytes:
    """Encode a message with its length prefix."""
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: Stream) -> bytes | None:
    """Read the body of the next message; blocks. None at the end of the stream."""
    head = _exactly(stream, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return _exactly(stream, length) if length <= MAX_FRAME_BYTES else None


def _exactly(stream: Stream, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
