"""The format of recordings: a folder for each life of a scheduler.

A scheduler that crashed is started again, and each of its lives has a folder, `life-1`, `life-2`
and so on, so that neither writes over the other. In it, `setup.json` says how the scheduler was
made, and `events.msgpack` holds what happened, in order: what came in, what the clock and the
capabilities answered, each step plan and each result. The scheduler is a function of inputs,
answers and results; a replay feeds them to a real scheduler and compares the plans.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from sylvan.protocol.errors import ConfigError, DeviceMemoryError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.step import PageCopy, StepPlan, StepResult

FORMAT = 5
SETUP, EVENTS = "setup.json", "events.msgpack"
LIFE = "life-"  # and its number
MAX_EVENT_BYTES = 64 << 20


class SchedulerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to make the same scheduler again. `limits` are the fields of `Limits`.

    `questions` are those that capabilities answered, "running gate" among them if they are asked
    about running requests too. `num_slots` are the request slots of the executor.
    `max_samples` and `draft_*`: see `ExecutorCaps`. `started`: when that was, in UTC; the recorder
    fills it in.
    """

    format: int = FORMAT
    kv_groups: tuple[KVGroup, ...]
    prefix: Literal["radix", "none"]
    eviction: str
    policy: str
    seed: int
    limits: dict[str, Any]
    questions: tuple[str, ...] = ()  # that capabilities answer, beyond the standard ones
    makes_vectors: bool = False
    pools_all: bool = False
    num_slots: int = 0
    lockstep: bool = False
    max_samples: int = 0
    draft_chains: bool = False
    draft_trees: bool = False
    tenant_weights: dict[str, float] = {}
    started: str = ""


class Called(msgspec.Struct, frozen=True, tag="call"):
    """A method of the scheduler, or of the port of capabilities, was called.

    "step" begins a step, which `Ended` ends.
    """

    method: Literal[
        "step",
        "abort",
        "abort_all",
        "stop_at",
        "pause",
        "resume",
        "flush_cache",
        "forget_kv",
        "audit",
        "loaded",
        "load_failed",
        "release",
    ]
    arguments: tuple[Finish | str | int | None, ...] = ()


class RequestAdded(msgspec.Struct, frozen=True, tag="add"):
    """A request came in."""

    request: GenerateRequest | EmbedRequest


class Ended(msgspec.Struct, frozen=True, tag="end"):
    """The step is over."""


class Now(msgspec.Struct, frozen=True, tag="now"):
    """The clock said this."""

    seconds: float


class CapabilitiesAnswered(msgspec.Struct, frozen=True, tag="answer"):
    """What the capabilities together answered to a question about a request.

    `answer` is a truth value, the name of a verdict, guesses (tokens, parents), a review (kept,
    settled: one number each), or a size (one number, and nothing); `refusal` says that one of them
    refused the request.
    """

    question: Literal[
        "gate",
        "admit",
        "may_draft",
        "draft",
        "cut",
        "holds",
        "stop_loading",
        "wants_step",
        "reviews",
        "review",
    ]
    rid: str  # empty: about no request
    answer: bool | str | tuple[tuple[int, ...], tuple[int, ...]] | None = None
    refusal: str | None = None


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    """A step plan went to the executor: its numbers, and what changed since the step before."""

    number: int
    num_slices: int
    numbers: bytes
    copies: tuple[PageCopy, ...]
    leaves: tuple[int, ...]
    joins: tuple[tuple[int, str, int], ...]  # slot, rid, outputs
    pages: bytes  # see `StepPlan.pages`


class Completed(msgspec.Struct, frozen=True, tag="result"):
    """What the oldest step in flight brought, or why it failed as a whole.

    `others` are the outputs that are no single id: (slice, token ids, error, status, ended,
    accepted). `short`: the step did not fit into the device's memory.
    """

    tokens: tuple[int, ...] = ()
    others: tuple[tuple[int, tuple[int, ...], str, int, bool, int | None], ...] = ()
    failure: str | None = None
    short: bool = False


Event = Called | RequestAdded | Ended | Now | CapabilitiesAnswered | Planned | Completed


class Recorder:
    """Appends events to the record of one life. Not thread-safe, as the scheduler is not.

    Attributes:
        folder: Of this life.
    """

    def __init__(self, folder: Path, setup: SchedulerSetup) -> None:
        """Start the next life in `folder`, which is made if need be; earlier ones stay.

        Raises:
            ConfigError: `folder` is itself a life of a recording, or cannot be written.
        """
        if (folder / SETUP).exists():
            raise ConfigError(f"cannot record to {folder}: it holds one life of a recording")
        setup = msgspec.structs.replace(setup, started=datetime.now(UTC).isoformat(" ", "seconds"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = _next_life(folder)
            (self.folder / SETUP).write_bytes(msgspec.json.format(msgspec.json.encode(setup)))
            self._file: BinaryIO = (self.folder / EVENTS).open("xb")
        except OSError as error:
            raise ConfigError(f"cannot record to {folder}: {error.strerror}") from error
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode)

    def write(self, event: Event) -> None:
        """Append one event. A step's events reach the disk when it ends."""
        data = self._encoder.encode(event)
        self._file.write(struct.pack("<I", len(data)) + data)
        if isinstance(event, Ended):
            self._file.flush()

    def close(self) -> None:
        """Finish the recording."""
        self._file.close()


def planned(plan: StepPlan) -> Planned:
    """What a plan comes down to; requests are recorded when they come in."""
    return Planned(
        plan.number,
        plan.num_slices,
        plan.numbers.tobytes(),
        plan.copies,
        tuple(plan.leaves),
        tuple((j.slot, j.request.rid, len(j.outputs)) for j in plan.joins),
        plan.pages.tobytes(),
    )


def completed(result: StepResult | Exception) -> Completed:
    """What a result comes down to; log probabilities and reports decide nothing."""
    if isinstance(result, Exception):
        return Completed(failure=str(result), short=isinstance(result, DeviceMemoryError))
    others = (
        (index, tuple(map(int, out.token_ids)), out.error, out.status, out.ended, out.accepted)
        for index, out in result.others.items()
    )
    return Completed(tuple(map(int, result.tokens)), tuple(others))


def lives(folder: Path) -> list[Path]:
    """The folders of all lives in a recording, oldest first; `folder` itself if it is one.

    Raises:
        ConfigError: there is none.
    """
    if (folder / SETUP).exists():
        return [folder]
    found = {number: path for number, path in _numbered(folder) if (path / SETUP).exists()}
    if not found:
        raise ConfigError(f"{folder} holds no recording: no {SETUP} in it, nor in a {LIFE}1")
    return [found[number] for number in sorted(found)]


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob(f"{LIFE}*"):
        number = path.name.removeprefix(LIFE)
        if number.isdecimal():
            yield int(number), path


def _next_life(folder: Path) -> Path:
    """Make the folder of a new life, which nobody else has even if two start at once."""
    number = max((number for number, _ in _numbered(folder)), default=0)
    while True:
        number += 1
        path = folder / f"{LIFE}{number}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def read(folder: Path) -> tuple[SchedulerSetup, Iterator[Event]]:
    """Open the record of one life; its events are read as they are asked for.

    Raises:
        ConfigError: there is none, or it is of another format.
    """
    try:
        setup = msgspec.json.decode((folder / SETUP).read_bytes(), type=SchedulerSetup)
        file = (folder / EVENTS).open("rb")
    except OSError as error:
        raise ConfigError(f"{folder} holds no recording: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / SETUP} cannot be read: {error}") from error
    if setup.format != FORMAT:
        raise ConfigError(f"{folder} is of format {setup.format}; this version reads {FORMAT}")
    return setup, _events(file)


def _events(file: BinaryIO) -> Iterator[Event]:
    decoder = msgspec.msgpack.Decoder(Event, dec_hook=_decode)
    with file:
        while len(size := file.read(4)) == 4:
            (length,) = struct.unpack("<I", size)
            data = file.read(min(length, MAX_EVENT_BYTES))
            if len(data) < length:
                return  # the process died while it wrote
            yield decoder.decode(data)


def _encode(value: object) -> Sequence[int] | bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, np.int32).tobytes()
    raise NotImplementedError(type(value).__name__)


def _decode(kind: type, value: object) -> object:
    if kind is np.ndarray and isinstance(value, bytes):
        return np.frombuffer(value, np.int32)
    raise NotImplementedError(kind.__name__)
