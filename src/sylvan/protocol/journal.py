"""How a gateway and a worker serve one request so that another worker can continue it.

The gateway sends a ticket in a header: what the answer is to be made from besides the request, so
that whoever makes it makes the same. The worker answers with frames. A frame carries bytes for the
client and, opaque to the gateway, the entries of the journal that they were made from. To have
another worker go on, the gateway sends the same request and ticket with the entries and the number
of frames that it has passed on since the last of them, in front of the body.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from sylvan.protocol.malformed import MALFORMED

TICKET_HEADER = "x-sylvan-ticket"
"""A ticket; or `PROBE`, which asks whether tickets are taken."""
KEY_HEADER = "x-sylvan-gateway-key"
"""By which a worker knows its gateway."""
RESUME_HEADER = "x-sylvan-resume-bytes"
"""Bytes of the body that are a `ResumeFrom`; the request follows them."""
JOURNAL_HEADER = "x-sylvan-journal"
"""In answers: `1`, tickets are taken; `0`, they are refused."""
PROBE = "probe"
MEDIA_TYPE = "application/x-sylvan-journal"
BEAT_S = 1.0
"""While a request is served, a frame comes at least so often."""

MAX_TICKET_CHARS = 8192
MAX_FRAME_BYTES = 256 << 20
_HEADER = struct.Struct(">BII")


class JournalError(ValueError):
    """The other side does not keep to the protocol."""


class JournalTicket(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is made from besides the request.

    Attributes:
        name: From which all names in the answer are derived; no two requests have the same.
        seed: For sampling, where neither the request nor the server says otherwise.
        created: Time of the request, in seconds since the Unix epoch.
        tenant: Tenant of the request; None: the worker determines it.
        elapsed_s: How long the request has been served elsewhere.
    """

    name: str
    seed: int
    created: float
    tenant: str | None = None
    elapsed_s: float = 0.0

    def to_header(self) -> str:
        """As it is sent."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def from_header(cls, text: str) -> JournalTicket:
        """Read what `to_header` made.

        Raises:
            JournalError: It is no ticket.
        """
        if len(text) > MAX_TICKET_CHARS:
            raise JournalError(f"a ticket has at most {MAX_TICKET_CHARS} characters")
        try:
            data = base64.b64decode(text, altchars=b"-_", validate=True)
            return msgspec.json.decode(data, type=cls)
        except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
            raise JournalError(f"malformed ticket: {error}") from error


class ResumeFrom(msgspec.Struct, frozen=True, array_like=True):
    """How far a client has come.

    Attributes:
        entries: Those of each frame that had any, as they came.
        num_frames: Frames passed on since the last entry, that of the last entry included.
    """

    entries: tuple[bytes, ...]
    num_frames: int

    def encode(self) -> bytes:
        """As it is sent."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ResumeFrom:
        """Read what `encode` made.

        Raises:
            JournalError: It is malformed.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except MALFORMED as error:
            raise JournalError(f"malformed journal: {error}") from error


class FrameKind(IntEnum):
    """What a frame is."""

    HEAD = 1  # status and headers, as `ResponseHead`
    DATA = 2  # bytes for the client, with the entries that they were made from
    BEAT = 3  # the request is being served
    END = 4  # the answer is complete; the body is `Totals`


class ResponseHead(msgspec.Struct, frozen=True, array_like=True):
    """Status and headers of an answer."""

    status: int
    headers: tuple[tuple[str, str], ...]


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a request, over all its prompts and samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JournalFrame:
    """One frame. `entries` is empty if there are none."""

    kind: FrameKind
    body: bytes = b""
    entries: bytes = b""

    def encode(self) -> bytes:
        """As it is sent."""
        return _HEADER.pack(self.kind, len(self.entries), len(self.body)) + self.entries + self.body


class FrameReader:
    """Finds frames in bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def at_border(self) -> bool:
        """Whether no frame has been begun."""
        return not self._pending

    def feed(self, data: bytes) -> Iterator[JournalFrame]:
        """Frames that are complete now.

        Raises:
            JournalError: The bytes are no frames.
        """
        pending = self._pending
        pending += data
        start = 0
        while len(pending) - start >= _HEADER.size:
            kind, num_entries, num_body = _HEADER.unpack_from(pending, start)
            if kind not in _KINDS or num_entries + num_body > MAX_FRAME_BYTES:
                raise JournalError("this is no frame")
            body_at = start + _HEADER.size + num_entries
            end = body_at + num_body
            if len(pending) < end:
                break
            entries = bytes(pending[start + _HEADER.size : body_at])
            yield JournalFrame(FrameKind(kind), bytes(pending[body_at:end]), entries)
            start = end
        del pending[:start]


_KINDS: Sequence[int] = tuple(FrameKind)


def read_head(frame: JournalFrame) -> ResponseHead:
    """The contents of a HEAD frame.

    Raises:
        JournalError: It is malformed.
    """
    try:
        return msgspec.msgpack.decode(frame.body, type=ResponseHead)
    except MALFORMED as error:
        raise JournalError(f"malformed head: {error}") from error


def read_totals(frame: JournalFrame) -> Totals:
    """The contents of an END frame.

    Raises:
        JournalError: It is malformed.
    """
    try:
        return msgspec.msgpack.decode(frame.body, type=Totals)
    except MALFORMED as error:
        raise JournalError(f"malformed totals: {error}") from error
