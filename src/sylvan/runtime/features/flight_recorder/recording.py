"""The format of recordings: one folder per run of a scheduler.

A crashed scheduler is restarted, and each run has its own folder, `run-1`, `run-2` and so on, so
that no run overwrites another. In it, `setup.json` says how the scheduler was built, and
`events.msgpack` contains what happened, in order: inputs, readings of the clock, answers of
capabilities, each step plan and each result. The scheduler is a function of inputs,
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
RUN_PREFIX = "run-"  # and its number
MAX_EVENT_BYTES = 64 << 20


class SchedulerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to build the same scheduler again. `limits` are the fields of `SchedulerLimits`.

    `questions` are the hooks that capabilities implement, including "running gate" if running
    requests are gated too. `num_slots` is the executor's number of request slots.
    `stages`, `max_samples` and `draft_*`: see `ExecutorCaps`. `started`: UTC start time, set by the
    recorder.
    """

    format: int = FORMAT
    kv_groups: tuple[KVGroup, ...]
    prefix: Literal["radix", "none"]
    eviction: str
    policy: str
    seed: int
    limits: dict[str, Any]
    questions: tuple[str, ...] = ()  # that capabilities answer, besides the standard ones
    makes_vectors: bool = False
    pools_all: bool = False
    num_slots: int = 0
    lockstep: bool = False
    stages: int = 1
    max_samples: int = 0
    draft_chains: bool = False
    draft_trees: bool = False
    tenant_weights: dict[str, float] = {}
    started: str = ""


class Called(msgspec.Struct, frozen=True, tag="call"):
    """A method of the scheduler, or of its capability port, was called.

    "step" starts a step, which `Ended` ends.
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
    """A request arrived."""

    request: GenerateRequest | EmbedRequest


class Ended(msgspec.Struct, frozen=True, tag="end"):
    """The step ended."""


class Now(msgspec.Struct, frozen=True, tag="now"):
    """A reading of the clock."""

    seconds: float


class CapabilitiesAnswered(msgspec.Struct, frozen=True, tag="answer"):
    """The combined answer of the capabilities to a question about a request.

    `answer` is a boolean, the name of a verdict, drafts (tokens, parents), a review (kept,
    final: one number each), or a size (one number, and nothing); `refusal` is set if one of them
    rejected the request.
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
    rid: str  # empty: not about a request
    answer: bool | str | tuple[tuple[int, ...], tuple[int, ...]] | None = None
    refusal: str | None = None


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    """A step plan for the executor: its numbers, and the changes since the step before."""

    number: int
    num_slices: int
    numbers: bytes
    copies: tuple[PageCopy, ...]
    leaves: tuple[int, ...]
    joins: tuple[tuple[int, str, int], ...]  # slot, rid, outputs
    pages: bytes  # see `StepPlan.pages`


class Completed(msgspec.Struct, frozen=True, tag="result"):
    """The result of the oldest step in flight, or why the step failed.

    `others` are outputs that are not a single ID: (slice, token IDs, error, status, ended,
    accepted). `short`: the step ran out of device memory.
    """

    tokens: tuple[int, ...] = ()
    others: tuple[tuple[int, tuple[int, ...], str, int, bool, int | None], ...] = ()
    failure: str | None = None
    short: bool = False


Event = Called | RequestAdded | Ended | Now | CapabilitiesAnswered | Planned | Completed


class Recorder:
    """Appends events to the record of one run. Not thread-safe, like the scheduler.

    Attributes:
        folder: Folder of this run.
    """

    def __init__(self, folder: Path, setup: SchedulerSetup) -> None:
        """Start the next run in `folder`, which is created if needed; earlier runs stay.

        Raises:
            ConfigError: `folder` is itself a run of a recording, or is not writable.
        """
        if (folder / SETUP).exists():
            raise ConfigError(f"cannot record to {folder}: it holds one run of a recording")
        setup = msgspec.structs.replace(setup, started=datetime.now(UTC).isoformat(" ", "seconds"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = _next_run(folder)
            (self.folder / SETUP).write_bytes(msgspec.json.format(msgspec.json.encode(setup)))
            self._file: BinaryIO = (self.folder / EVENTS).open("xb")
        except OSError as error:
            raise ConfigError(f"cannot record to {folder}: {error.strerror}") from error
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode)

    def write(self, event: Event) -> None:
        """Append one event. A step's events are flushed when it ends."""
        data = self._encoder.encode(event)
        self._file.write(struct.pack("<I", len(data)) + data)
        if isinstance(event, Ended):
            self._file.flush()

    def close(self) -> None:
        """Finish the recording."""
        self._file.close()


def planned(plan: StepPlan) -> Planned:
    """Summarise a plan; requests are recorded when they arrive."""
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
    """Summarise a result; log probabilities and reports do not affect decisions."""
    if isinstance(result, Exception):
        return Completed(failure=str(result), short=isinstance(result, DeviceMemoryError))
    others = (
        (index, tuple(map(int, out.token_ids)), out.error, out.status, out.ended, out.accepted)
        for index, out in result.others.items()
    )
    return Completed(tuple(map(int, result.tokens)), tuple(others))


def runs(folder: Path) -> list[Path]:
    """Return the folders of all runs in a recording, oldest first; `folder` itself if it is one.

    Raises:
        ConfigError: There is none.
    """
    if (folder / SETUP).exists():
        return [folder]
    found = {number: path for number, path in _numbered(folder) if (path / SETUP).exists()}
    if not found:
        raise ConfigError(f"{folder} holds no recording: no {SETUP} in it, nor in a {RUN_PREFIX}1")
    return [found[number] for number in sorted(found)]


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob(f"{RUN_PREFIX}*"):
        number = path.name.removeprefix(RUN_PREFIX)
        if number.isdecimal():
            yield int(number), path


def _next_run(folder: Path) -> Path:
    """Create the folder of a new run, unique even if two start at once."""
    number = max((number for number, _ in _numbered(folder)), default=0)
    while True:
        number += 1
        path = folder / f"{RUN_PREFIX}{number}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def read(folder: Path) -> tuple[SchedulerSetup, Iterator[Event]]:
    """Open the record of one run; events are read lazily.

    Raises:
        ConfigError: There is none, or it has another format.
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
                return  # the process died while writing
            yield decoder.decode(data)


def _encode(value: object) -> Sequence[int] | bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, np.int32).tobytes()
    raise NotImplementedError(type(value).__name__)


def _decode(kind: type, value: object) -> object:
    if kind is np.ndarray and isinstance(value, bytes):
        return np.frombuffer(value, np.int32)
    raise NotImplementedError(kind.__name__)
