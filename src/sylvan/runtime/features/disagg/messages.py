"""The protocol between prefill and decode servers, and its authentication.

One connection serves one request. The prefill server sends Hello; the decode server asks for a
room, and is accepted or denied; once it has memory it sends RequestPages for the pages it lacks,
receives them, and sends Done. A decode server that reads the prefill server's memory gets addresses
instead of pages, and waits for Unchanged: the pages did not change until it was done. All ranks of
a decode server connect to the first rank of the prefill server, which redirects them to their
counterparts.
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
    """The prefill server has the request. `offers`: mechanisms to read its memory, by name."""

    proof: bytes
    offers: dict[str, bytes] = {}


class Redirect(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Another rank has this part of the KV and listens at this port."""

    port: int


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """The two must not exchange this KV."""

    reason: str


class RequestPages(msgspec.Struct, frozen=True, tag="want"):
    """Request pages from entry `first` on, and the page sets of these `groups`.

    They go through shared memory if there is a `segment`; with `pull`, by reading memory.
    """

    first: int
    segment: str = ""
    pull: str = ""
    groups: tuple[int, ...] = ()


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Some pages: in the payload, or at their place in the segment. `checksums` are XXH3-64.

    `group`: these pages are the whole page set of that KV group, and `first` is unused; -1: pages
    of the first page table. `pages`: page numbers, to be read remotely.
    """

    first: int
    count: int
    checksums: bytes
    last: bool
    in_segment: bool = False
    group: int = msgspec.field(default=-1, name="lot")
    pages: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The transfer failed; no more pages follow."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All pages have arrived."""


class Unchanged(msgspec.Struct, frozen=True, tag="kept"):
    """No page changed before `Done` arrived: what was read is valid."""


Message = (
    Hello | Ask | Accepted | Redirect | Denied | RequestPages | Pages | Failed | Done | Unchanged
)
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Decode a message.

    Raises:
        ChannelError: It is malformed.
    """
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise ChannelError(f"a malformed message: {error}") from None


def proof(secret: bytes, role: bytes, hello: Hello, ask: Ask) -> bytes:
    """Prove that `role` knows the secret, for this connection and request only."""
    said = hashlib.sha256()
    for part in (role, hello.nonce, ask.nonce, ask.identity, b"%d" % ask.room, ask.digest):
        said.update(b"%d:" % len(part))
        said.update(part)
    return hmac.digest(secret, said.digest(), "sha256")


def prompt_digest(ids: IntArray, lora: str | None) -> bytes:
    """Hash everything that the KV of a prompt depends on, besides the model."""
    found = xxhash.xxh3_128(ids.astype("<i4").tobytes())
    found.update(b"|" + (lora or "").encode())
    return found.digest()
