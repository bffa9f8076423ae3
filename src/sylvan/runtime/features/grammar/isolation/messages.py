"""Messages between the engine and the processes of isolated grammars, over Unix sockets."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from sylvan.runtime.features.grammar.wire import MAX_FRAME_BYTES, Stream, frame, read_frame

Message = TypeVar("Message", bound=msgspec.Struct)

_MARK = b"\0"  # data sent along with a socket


class GrammarLoaded(msgspec.Struct, frozen=True, array_like=True):
    """First message of a grammar's process; with a `reason`, loading failed."""

    reason: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """Roll one matcher back by `rollback` tokens, then accept `tokens`.

    An unknown `matcher` is a new one, at the start. Matchers in `closed` are deleted.
    """

    matcher: int
    rollback: int = 0
    tokens: list[int] = []
    wants_mask: bool = False
    closed: list[int] = []


class State(msgspec.Struct, frozen=True, array_like=True):
    """State of a matcher after a `Step`.

    Attributes:
        taken: Number of accepted tokens.
        is_accepting: See `GrammarMatcher.is_accepting`.
        is_terminated: See `GrammarMatcher.is_terminated`.
        forced: See `GrammarMatcher.forced`.
        mask: A row of `GrammarMatcher.fill_mask`; empty if text is forced and no mask is needed.
        error: See `GrammarMatcher.error`.
    """

    taken: int = 0
    is_accepting: bool = False
    is_terminated: bool = False
    forced: bytes = b""
    mask: bytes = b""
    error: str = ""


def send(out: socket.socket, message: msgspec.Struct) -> None:
    """Send a message with its length prefix."""
    out.sendall(frame(msgspec.msgpack.encode(message)))


def send_socket(out: socket.socket, passed: socket.socket, data: bytes) -> None:
    """Send a socket, with some data."""
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes are too many")
    socket.send_fds(out, [_MARK], [passed.fileno()])
    out.sendall(frame(data))


def receive_socket(source: socket.socket) -> tuple[socket.socket, bytes] | None:
    """Receive what `send_socket` sent; blocks. None at the end."""
    mark, fds, _, _ = socket.recv_fds(source, len(_MARK), 1)
    if not mark or not fds:
        return None
    passed = socket.socket(fileno=fds[0])
    with source.makefile("rb", buffering=0) as stream:
        data = read_frame(stream)
    return None if data is None else (passed, data)


def receive(stream: Stream, decoder: msgspec.msgpack.Decoder[Message]) -> Message | None:
    """Receive the next message of a stream; blocks. None at the end."""
    body = read_frame(stream)
    return None if body is None else decoder.decode(body)
