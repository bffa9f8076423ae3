"""Protocol that lets another worker continue a request served through a gateway.

The gateway sends a ticket in a header: everything besides the request that determines the answer,
so that any worker generates the same one. The worker answers with frames. A frame carries bytes for
the client and, opaque to the gateway, the journal entries from which they were made. To let another
worker continue, the gateway sends the same request and ticket, and in front of the body the entries
and the number of frames that it has forwarded since the last entry.
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
"""Header with a ticket, or `PROBE` to ask whether the worker accepts tickets."""
KEY_HEADER = "x-sylvan-gateway-key"
"""Header with the key by which a worker recognises its gateway."""
RESUME_HEADER = "x-sylvan-resume-bytes"
"""Header with the size of the `ResumeFrom` that precedes the request in the body."""
JOURNAL_HEADER = "x-sylvan-journal"
"""Header of answers: `1` if tickets are accepted, `0` if not."""
PROBE = "probe"
MEDIA_TYPE = "application/x-sylvan-journal"
BEAT_S = 1.0
"""Maximum interval between frames while a request is served, in seconds."""

MAX_TICKET_CHARS = 8192
MAX_FRAME_BYTES = 256 << 20
_HEADER = struct.Struct(">BII")


class JournalError(ValueError):
    """The other side violates the protocol."""


class JournalTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the request that determines an answer.

    Attributes:
        name: Unique name from which all ids in the answer are derived.
        seed: Seed for sampling, unless the request or the server sets one.
        created: Time of the request, in seconds since the Unix epoch.
        tenant: Tenant of the request; None: the worker determines it.
        elapsed_s: Seconds for which other workers have served the request.
    """

    name: str
    seed: int
    created: float
    tenant: str | None = None
    elapsed_s: float = 0.0

    def to_header(self) -> str:
        """Encode for the header."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def from_header(cls, text: str) -> JournalTicket:
        """Decode the output of `to_header`.

        Raises:
            JournalError: it is malformed.
        """
        if len(text) > MAX_TICKET_CHARS:
            raise JournalError(f"a ticket has at most {MAX_TICKET_CHARS} characters")
        try:
            data = base64.b64decode(text, altchars=b"-_", validate=True)
            return msgspec.json.decode(data, type=cls)
        except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
            raise JournalError(f"malformed ticket: {error}") from error


class ResumeFrom(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a client.

    Attributes:
        entries: Journal entries of all frames that had any.
        num_frames: Frames forwarded since the last entry, including the frame of that entry.
    """

    entries: tuple[bytes, ...]
    num_frames: int

    def encode(self) -> bytes:
        """Encode for the body."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ResumeFrom:
        """Decode the output of `encode`.

        Raises:
            JournalError: it is malformed.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except MALFORMED as error:
            raise JournalError(f"malformed journal: {error}") from error


class FrameKind(IntEnum):
    """Kind of a frame."""

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
    """Parses frames from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def at_border(self) -> bool:
        """Whether no frame is incomplete."""
        return not self._pending

    def feed(self, data: bytes) -> Iterator[JournalFrame]:
        """Yield the frames that are complete now.

        Raises:
            JournalError: the bytes are malformed.
        """
        pending = self._pending
        pending += data
        start = 0
        while len(pending) - start >= _HEADER.size:
            kind, num_entries, num_body = _HEADER.unpack_from(pending, start)
            if kind not in _KINDS or num_entries + num_body > MAX_FRAME_BYTES:
                raise JournalError("this is not a frame")
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
    """Decode the body of a HEAD frame.

    Raises:
        JournalError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(frame.body, type=ResponseHead)
    except MALFORMED as error:
        raise JournalError(f"malformed head: {error}") from error


def read_totals(frame: JournalFrame) -> Totals:
    """Decode the body of an END frame.

    Raises:
        JournalError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(frame.body, type=Totals)
    except MALFORMED as error:
        raise JournalError(f"malformed totals: {error}") from error
