"""What passes between the two halves of either role. Nothing here is a tensor.

A job is a request under way; its number is given by the control half.
"""

from __future__ import annotations

import msgspec

from sylvan.protocol.arrays import IntArray


class Expose(msgspec.Struct, frozen=True, tag="expose"):
    """A decode server may ask for the KV of a prompt by this room, if it has the same prompt."""

    job: int
    room: int
    digest: bytes


class Lot(msgspec.Struct, frozen=True):
    """Pages of a window group, or the slot of a recurrent state: handed over once, as a whole."""

    group: int
    pages: tuple[int, ...]


class SendPages(msgspec.Struct, frozen=True, tag="send"):
    """Send pages: entries [first, first + len(pages)) of the first page table.

    `last`: none follow; then `lots` of the other groups are sent, too.
    """

    job: int
    first: int
    pages: tuple[int, ...]
    last: bool
    lots: tuple[Lot, ...] = ()


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Send nothing more; the decode server is told why."""

    job: int
    reason: str


PrefillWork = tuple[Expose | SendPages | Withdraw, ...]


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A decode server has memory, and lacks the pages from entry `first` on."""

    job: int
    first: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """So many bytes have been sent, or may be read."""

    job: int
    num_bytes: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The decode server has everything, or why it will not."""

    job: int
    error: str = ""


PrefillEvents = tuple[Asked | Sent | Over, ...]


class JoinRoom(msgspec.Struct, frozen=True, tag="join"):
    """Meet the prefill server that listens there, in a room."""

    job: int
    host: str
    port: int
    room: int
    digest: bytes


class AskAgain(msgspec.Struct, frozen=True, tag="again"):
    """Have the prefill server of a job compute these tokens, in the room that the job joins."""

    job: int
    host: str
    port: int
    room: int
    ids: IntArray


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Fill pages: entries [first, first + len(pages)) of the first page table, and `lots`."""

    job: int
    first: int
    pages: tuple[int, ...]
    lots: tuple[Lot, ...] = ()


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Write nothing more. `Left` follows, unless the job has ended already."""

    job: int


DecodeWork = tuple[JoinRoom | AskAgain | Receive | Leave, ...]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The prefill server has shown life: it accepted, or sent some pages."""

    job: int


class Received(msgspec.Struct, frozen=True, tag="received"):
    """All pages are there."""

    job: int
    num_bytes: int
    seconds: float  # since the pages were asked for


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The two servers must not exchange this KV; the request cannot be served this way."""

    job: int
    reason: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The KV does not come. Nothing is written any more."""

    job: int
    reason: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """After `Leave`: nothing is written any more."""

    job: int


DecodeEvents = tuple[Progress | Received | Refused | Lost | Left, ...]
