"""The last steps of a scheduler, in memory that outlives it: what a hang dump and a trace show.

The ring is a buffer of fixed records, each with its number. In a process of its own the scheduler
writes to a file that the API process maps, too: the record is there even if the scheduler hangs or
was killed, and reading it costs the scheduler nothing.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

CAPACITY = 4096
"""Steps that a ring keeps."""

_RECORD = struct.Struct("<QdddIIIIIIIII32s")
_DONE = struct.Struct("<dI")
_DONE_AT = 24  # `completed_s` and `failed` in a record
_NUMBER = struct.Struct("<Q")
_SIZE = _RECORD.size
_write, _write_end = _RECORD.pack_into, _DONE.pack_into  # looked up here, not at each step


ForwardMode = Literal["EXTEND", "DECODE", "MIXED", "TARGET_VERIFY"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one step was decided to compute, and when. Times: seconds of the monotonic clock.

    Attributes:
        number: Counts the steps that computed something, from 1.
        planned_s: When planning began.
        launched_s: When the executor was given the step.
        completed_s: When its result was in; 0: it is under way, or was when the scheduler ended.
        failed: It raised.
        requests: Slices of it.
        decodes: Of these, plain decodes.
        prompt_tokens: Tokens of prompts that it computes.
        tokens: All tokens that it computes.
        running: Requests that ran.
        waiting: Requests that waited.
        retractions: Requests that lost their memory, since the scheduler started.
        guesses: Guesses of drafters that it verifies.
        first_rid: Internal name of its first request, cut to 32 bytes.
    """

    number: int
    planned_s: float
    launched_s: float
    completed_s: float
    failed: bool
    requests: int
    decodes: int
    prompt_tokens: int
    tokens: int
    running: int
    waiting: int
    retractions: int
    guesses: int
    first_rid: str

    @property
    def forward_mode(self) -> ForwardMode:
        """What kind of forward pass it was, in SGLang's terms."""
        if self.guesses:
            return "TARGET_VERIFY"
        if self.decodes == self.requests:
            return "DECODE"
        return "MIXED" if self.decodes else "EXTEND"


class StepLog:
    """Writes the records of a scheduler's steps, in order, over the oldest ones.

    Not thread-safe, as the scheduler is not; others may read meanwhile.
    """

    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(size())
        self._count = 0

    @property
    def buffer(self) -> bytearray | mmap.mmap:
        """What `read_steps` reads."""
        return self._buffer

    def move_to(self, path: Path) -> None:
        """Go on in a file, which others may map.

        Raises:
            OSError: it cannot be written.
        """
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_bytes(bytes(self._buffer))
        self._buffer = map_steps(fresh, write=True)
        fresh.replace(path)  # readers that mapped the file of an earlier scheduler keep it

    def launched(
        self, planned_s: float, launched_s: float, counts: tuple[int, ...], first_rid: bytes
    ) -> int:
        """A step was given to the executor; returns its number.

        `counts`: requests, decodes, prompt tokens, tokens, running, waiting, retractions, guesses.
        """
        self._count = number = self._count + 1
        place = (number - 1) % CAPACITY * _SIZE
        _write(self._buffer, place, number, planned_s, launched_s, 0.0, 0, *counts, first_rid)
        return number

    def completed(self, number: int, now_s: float, *, failed: bool = False) -> None:
        """The result of a step is in."""
        if self._count - number < CAPACITY:
            _write_end(self._buffer, (number - 1) % CAPACITY * _SIZE + _DONE_AT, now_s, failed)


def size() -> int:
    """Bytes of a ring."""
    return CAPACITY * _SIZE


def map_steps(path: Path, *, write: bool = False) -> mmap.mmap:
    """The ring in a file.

    Raises:
        OSError: there is none.
        ValueError: it is no ring.
    """
    with path.open("r+b" if write else "rb") as file:
        return mmap.mmap(
            file.fileno(), size(), access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        )


def read_steps(buffer: bytearray | mmap.mmap, last: int = CAPACITY) -> list[StepRecord]:
    """The last steps in a ring, oldest first; one that is being overwritten is left out."""
    numbers = np.ndarray(CAPACITY, np.uint64, buffer, strides=(_SIZE,))
    count = int(numbers.max())
    del numbers  # it would keep a mapped file from being closed
    found: list[StepRecord] = []
    for number in range(max(1, count - min(last, CAPACITY) + 1), count + 1):
        place = (number - 1) % CAPACITY * _SIZE
        fields = _RECORD.unpack_from(buffer, place)
        (again,) = _NUMBER.unpack_from(buffer, place)
        if not fields[0] == again == number:
            continue
        _, planned, launched, completed, failed, *counts, rid = fields
        requests, decodes, prompt_tokens, tokens, running, waiting, retractions, guesses = counts
        record = StepRecord(
            number=number,
            planned_s=planned,
            launched_s=launched,
            completed_s=completed,
            failed=bool(failed),
            requests=requests,
            decodes=decodes,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            running=running,
            waiting=waiting,
            retractions=retractions,
            guesses=guesses,
            first_rid=rid.rstrip(b"\0").decode("utf-8", "replace"),
        )
        found.append(record)
    return found
