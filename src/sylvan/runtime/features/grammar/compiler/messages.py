"""What the scheduler process and the compiling process say to each other, over two pipes."""

from __future__ import annotations

import struct
from typing import IO

import msgspec

from sylvan.runtime.features.grammar.api import MAX_STATES

MAX_MESSAGE_BYTES = 1 << 30

_LENGTH = struct.Struct("<I")

SIGN_OF_LIFE = _LENGTH.pack(0)
"""A frame that says nothing."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What compiling one grammar may take.

    Seconds are of processor time: compiling makes way for whatever else runs, and a busy machine is
    no fault of the grammar's. One that needs more than `quick_s` is stopped and tried again in the
    slow lane, with all of `timeout_s`, so that hard grammars wait for each other and never hold up
    easy ones. States are those of the grammar's automaton, made while it is compiled or later,
    while outputs are written; see `GrammarBackend.grows_later`.
    """

    timeout_s: float = 10.0
    quick_s: float = 1.0
    memory_bytes: int = 1 << 30
    max_states: int = MAX_STATES
    quick_lanes: int = 2
    slow_lanes: int = 1


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Sent first: the library, the vocabulary, the limits."""

    backend: str
    tokens: list[bytes]
    special: dict[str, int]
    eos_ids: tuple[int, ...]
    limits: Limits


class Prove(msgspec.Struct, frozen=True, kw_only=True, tag="prove"):
    """Compile this grammar."""

    id: int
    kind: str
    text: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for it any more."""

    id: int


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What came of `Prove`.

    `data` is what `GrammarBackend.load` takes; with a `reason`, it cannot be compiled. `on_idle`:
    it was proved on cores that had nothing else to do. `starved`: such cores were too few to say.
    """

    id: int
    data: bytes = b""
    reason: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0
    on_idle: bool = False
    starved: bool = False


Order = Prepare | Prove | Cancel


def pack(message: Order | Proof) -> bytes:
    """A message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The body of the next message; blocks. None at the end of the stream."""
    head = _exactly(stream, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return _exactly(stream, length) if length <= MAX_MESSAGE_BYTES else None


def _exactly(stream: IO[bytes], count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            return None
        data += part
    return data
