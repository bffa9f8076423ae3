"""What the engine and the processes of isolated grammars say to each other, over Unix sockets."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from sylvan.runtime.features.grammar.wire import MAX_FRAME_BYTES, Stream, frame, read_frame

Message = TypeVar("Message", bound=msgspec.Struct)

_MARK = b"\0"  # travels with a socket


class GrammarLoaded(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a grammar's process; with a `reason` there is no grammar."""

    reason: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One matcher goes back by `rollback` tokens, then on by `tokens`.

    An unknown `matcher` is a new one, at the start. Matchers in `closed` are forgotten.
    """

    matcher: int
    rollback: int = 0
    tokens: list[int] = []
    wants_mask: bool = False
    closed: list[int] = []


class State(msgspec.Struct, frozen=True, array_like=True):
    """Where a matcher is after a `Step`.

    Attributes:
        taken: How many of the tokens were accepted.
        is_accepting: See `GrammarMatcher.is_accepting`.
        is_terminated: See `GrammarMatcher.is_terminated`.
        forced: See `GrammarMatcher.forced`.
        mask: A row of `GrammarMatcher.fill_mask`; empty where text is forced and no mask wanted.
        error: See `GrammarMatcher.error`.
    """

    taken: int = 0
    is_accepting: bool = False
    is_terminated: bool = False
    forced: bytes = b""
    mask: bytes = b""
    error: str = ""


def send(out: socket.socket, message: msgspec.Struct) -> None:
    """Send a message with its length in front."""
    out.sendall(frame(msgspec.msgpack.encode(message)))


def send_socket(out: socket.socket, passed: socket.socket, data: bytes) -> None:
    """Pass a socket on, with some data."""
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes are too many")
    socket.send_fds(out, [_MARK], [passed.fileno()])
    out.sendall(frame(data))


def receive_socket(source: socket.socket) -> tuple[socket.socket, bytes] | None:
    """What `send_socket` sent; blocks. None at the end."""
    mark, fds, _, _ = socket.recv_fds(source, len(_MARK), 1)
    if not mark or not fds:
        return None
    passed = socket.socket(fileno=fds[0])
    with source.makefile("rb", buffering=0) as stream:
        data = read_frame(stream)
    return None if data is None else (passed, data)


def receive(stream: Stream, decoder: msgspec.msgpack.Decoder[Message]) -> Message | None:
    """The next message of a stream; blocks. None at the end."""
    body = read_frame(stream)
    return None if body is None else decoder.decode(body)
