"""Messages between the halves of both roles. They contain no tensors.

A job is a request in transfer; the control half assigns its number.
"""

from __future__ import annotations

import msgspec

from sylvan.protocol.arrays import IntArray


class Expose(msgspec.Struct, frozen=True, tag="expose"):
    """Allow a decode server to ask for a prompt's KV by this room, if it has the same prompt."""

    job: int
    room: int
    digest: bytes


class PageSet(msgspec.Struct, frozen=True):
    """All pages of a window group, or the slot of a recurrent state: sent once, as a whole."""

    group: int
    pages: tuple[int, ...]


class SendPages(msgspec.Struct, frozen=True, tag="send"):
    """Send pages: entries [first, first + len(pages)) of the first page table.

    `last`: no more follow; then `page_sets` of the other groups are sent too.
    """

    job: int
    first: int
    pages: tuple[int, ...]
    last: bool
    page_sets: tuple[PageSet, ...] = ()


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Stop sending; the decode server gets the reason."""

    job: int
    reason: str


PrefillWork = tuple[Expose | SendPages | Withdraw, ...]


class PagesRequested(msgspec.Struct, frozen=True, tag="asked"):
    """A decode server has memory, and needs the pages from entry `first` on."""

    job: int
    first: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """A number of bytes was sent, or can be read by the peer."""

    job: int
    num_bytes: int


class SendingEnded(msgspec.Struct, frozen=True, tag="over"):
    """The decode server has received everything, or reports why it will not."""

    job: int
    error: str = ""


PrefillEvents = tuple[PagesRequested | Sent | SendingEnded, ...]


class JoinRoom(msgspec.Struct, frozen=True, tag="join"):
    """Connect to the prefill server at that address, in a room."""

    job: int
    host: str
    port: int
    room: int
    digest: bytes


class PrefillAgain(msgspec.Struct, frozen=True, tag="again"):
    """Have the job's prefill server prefill these tokens, in the room that the job joins."""

    job: int
    host: str
    port: int
    room: int
    ids: IntArray


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Fill pages: entries [first, first + len(pages)) of the first page table, and `page_sets`."""

    job: int
    first: int
    pages: tuple[int, ...]
    page_sets: tuple[PageSet, ...] = ()


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Stop writing. `LeaveDone` follows, unless the job has already ended."""

    job: int


DecodeWork = tuple[JoinRoom | PrefillAgain | Receive | Leave, ...]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The prefill server made progress: it accepted the job, or sent pages."""

    job: int


class Received(msgspec.Struct, frozen=True, tag="received"):
    """All pages have arrived."""

    job: int
    num_bytes: int
    seconds: float  # since the pages were requested


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The two servers must not exchange this KV; the request fails."""

    job: int
    reason: str


class TransferFailed(msgspec.Struct, frozen=True, tag="lost"):
    """The transfer failed. Nothing is written any more."""

    job: int
    reason: str


class LeaveDone(msgspec.Struct, frozen=True, tag="left"):
    """Answer to `Leave`: nothing is written any more."""

    job: int


DecodeEvents = tuple[Progress | Received | Refused | TransferFailed | LeaveDone, ...]
