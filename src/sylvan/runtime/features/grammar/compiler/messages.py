"""What the scheduler process and the compiling process say to each other, over two pipes."""

from __future__ import annotations

import msgspec

from sylvan.runtime.features.grammar.wire import Prepare, frame

MAX_GRAMMAR_BYTES = 64 << 20
"""Of a compiled grammar that crosses processes."""

SIGN_OF_LIFE = frame(b"")
"""A frame that says nothing."""


class Prove(msgspec.Struct, frozen=True, kw_only=True, tag="prove"):
    """Compile this grammar."""

    id: int
    kind: str
    text: str
    exact: bool = False


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for it any more."""

    id: int


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What came of `Prove`.

    `data` is what `GrammarLoader.load` of `library` takes; with a `reason`, it cannot be compiled.
    `timed_out`: because it took longer than it may. `on_idle`: it was proved on cores that had
    nothing else to do. `starved`: such cores were too few to say. `lost`: keywords that the grammar
    does not hold everywhere, by the place of their schema (`guard.relax.Lost`).
    """

    id: int
    library: str = ""
    data: bytes = b""
    reason: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0
    timed_out: bool = False
    on_idle: bool = False
    starved: bool = False
    lost: dict[str, tuple[str, ...]] = {}


Order = Prepare | Prove | Cancel


def pack(message: Order | Proof) -> bytes:
    """A message with its length in front."""
    return frame(msgspec.msgpack.encode(message))
