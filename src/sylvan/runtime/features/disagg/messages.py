"""What prefill and decode servers say to each other, and how they prove who they are.

One connection serves one request. The prefill server says Hello; the decode server asks for a room;
is accepted or refused; wants the pages that it lacks once it has memory; gets pages until the last;
and says that it has received them. A decode server that reads the other's memory is told where
pages are instead, and waits for the word that they were kept until it was done. Ranks of a decode
server come to where the first rank of the prefill server listens, and are told where their own
counterparts do.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import xxhash

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.features.disagg.channel import ChannelError

PROTOCOL = 3
NONCE_BYTES = 32


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a prefill server."""

    protocol: int
    nonce: bytes


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A decode server asks for the KV of a prompt.

    `identity` is its encoded `Manifest`, `digest` that of the prompt.
    """

    protocol: int
    nonce: bytes
    proof: bytes
    identity: bytes
    room: int
    digest: bytes


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The prefill server has such a request. `offers`: ways to read its memory, by name."""

    proof: bytes
    offers: dict[str, bytes] = {}


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Another rank has this part of the KV: it listens at this port."""

    port: int


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """The two must not exchange this KV."""

    reason: str


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Pages from entry `first` on are wanted, with a lot of each of these `groups`.

    Through shared memory, if there is a `segment`; with `pull` the memory is read that way.
    """

    first: int
    segment: str = ""
    pull: str = ""
    groups: tuple[int, ...] = ()


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Some pages: the payload, or in the segment where their place is. `checksums` are XXH3-64.

    `lot`: they are the lot of that KV group, whatever `first`; -1: they are none. `pages`: their
    numbers, to be read there.
    """

    first: int
    count: int
    checksums: bytes
    last: bool
    in_segment: bool = False
    lot: int = -1
    pages: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """No more pages come."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All pages were received."""


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """All pages stayed what they were until they were said to be received."""


Message = Hello | Ask | Accepted | Elsewhere | Denied | Want | Pages | Failed | Done | Kept
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """As bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The reverse.

    Raises:
        ChannelError: it is no message.
    """
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise ChannelError(f"a malformed message: {error}") from None


def proof(secret: bytes, role: bytes, hello: Hello, ask: Ask) -> bytes:
    """Shows that whoever has `role` knows the secret, for this connection and request only."""
    said = hashlib.sha256()
    for part in (role, hello.nonce, ask.nonce, ask.identity, b"%d" % ask.room, ask.digest):
        said.update(b"%d:" % len(part))
        said.update(part)
    return hmac.digest(secret, said.digest(), "sha256")


def prompt_digest(ids: IntArray, lora: str | None) -> bytes:
    """Of all that the KV of a prompt depends on, beside the model."""
    found = xxhash.xxh3_128(ids.astype("<i4").tobytes())
    found.update(b"|" + (lora or "").encode())
    return found.digest()
