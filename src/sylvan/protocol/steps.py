"""The last steps of a scheduler, in memory that outlives it, for hang dumps and traces.

The ring is a buffer of fixed-size, numbered records. A scheduler process writes to a file that the
API process maps too: the records survive if the scheduler hangs or is killed, and reading them
costs the scheduler nothing.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

CAPACITY = 4096
"""Number of steps that a ring keeps."""

_RECORD = struct.Struct("<QdddIIIIIIIII32s")
_DONE = struct.Struct("<dI")
_DONE_AT = 24  # `completed_s` and `failed` in a record
_NUMBER = struct.Struct("<Q")
_SIZE = _RECORD.size
_write, _write_end = _RECORD.pack_into, _DONE.pack_into  # looked up once, not in each step


ForwardMode = Literal["EXTEND", "DECODE", "MIXED", "TARGET_VERIFY"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The planned work of a step, and its times in seconds of the monotonic clock.

    Attributes:
        number: Counts the steps that computed something, from 1.
        planned_s: When planning started.
        launched_s: When the step was launched.
        completed_s: When its result arrived; 0: in flight, or was when the scheduler ended.
        failed: Whether it raised an error.
        requests: Number of slices.
        decodes: Of these, plain decodes.
        prompt_tokens: Prompt tokens computed.
        tokens: All tokens computed.
        running: Running requests.
        waiting: Waiting requests.
        retractions: Retractions since the scheduler started.
        drafted: Draft tokens verified.
        first_rid: Internal name of its first request, truncated to 32 bytes.
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
    drafted: int
    first_rid: str

    @property
    def forward_mode(self) -> ForwardMode:
        """The kind of forward pass, in SGLang's terms."""
        if self.drafted:
            return "TARGET_VERIFY"
        if self.decodes == self.requests:
            return "DECODE"
        return "MIXED" if self.decodes else "EXTEND"


class StepLog:
    """Writes the records of a scheduler's steps, in order, overwriting the oldest.

    Not thread-safe, like the scheduler; others may read concurrently.
    """

    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(size())
        self._count = 0

    @property
    def buffer(self) -> bytearray | mmap.mmap:
        """The buffer for `read_steps`."""
        return self._buffer

    def move_to(self, path: Path) -> None:
        """Continue in a file, which others may map.

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
        """Record a launched step; return its number.

        `counts`: requests, decodes, prompt tokens, tokens, running, waiting, retractions,
        draft tokens.
        """
        self._count = number = self._count + 1
        place = (number - 1) % CAPACITY * _SIZE
        _write(self._buffer, place, number, planned_s, launched_s, 0.0, 0, *counts, first_rid)
        return number

    def completed(self, number: int, now_s: float, *, failed: bool = False) -> None:
        """Record that the result of a step arrived."""
        if self._count - number < CAPACITY:
            _write_end(self._buffer, (number - 1) % CAPACITY * _SIZE + _DONE_AT, now_s, failed)


def size() -> int:
    """Size of a ring in bytes."""
    return CAPACITY * _SIZE


def map_steps(path: Path, *, write: bool = False) -> mmap.mmap:
    """Map the ring in a file.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not a ring.
    """
    with path.open("r+b" if write else "rb") as file:
        return mmap.mmap(
            file.fileno(), size(), access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        )


def read_steps(buffer: bytearray | mmap.mmap, last: int = CAPACITY) -> list[StepRecord]:
    """The last steps in a ring, oldest first; omits one that is being overwritten."""
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
        requests, decodes, prompt_tokens, tokens, running, waiting, retractions, drafted = counts
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
            drafted=drafted,
            first_rid=rid.rstrip(b"\0").decode("utf-8", "replace"),
        )
        found.append(record)
    return found
