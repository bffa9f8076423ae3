"""Flight recorder: every input and decision of a scheduler, and their replay without a model.

A recording is a folder with one folder for each life of the scheduler, `life-1`, `life-2` and so
on: one that crashed is started again, and neither writes over the other. In it, `setup.json` says
how the scheduler was made, `events.msgpack` holds what happened, in order: what came in, what the
clock, the features and the executor answered, and what was decided. The scheduler is a function of
the former; a replay feeds them to a real scheduler and compares the latter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from sylvan.protocol.errors import ConfigError, DeviceMemoryError, ExecutorError, RequestError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.req import Batch, Draft, Req, Slice, StepResult
from sylvan.runtime.executor.api import Executor, ExecutorCaps, Pending
from sylvan.runtime.sched.feature import Feature, Verdict
from sylvan.utils.clock import Clock

FORMAT = 2
SETUP, EVENTS = "setup.json", "events.msgpack"
LIFE = "life-"  # and its number
MAX_EVENT_BYTES = 64 << 20


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to make the same scheduler again. `limits` are the fields of `Limits`.

    `started`: when that was, in UTC; the recorder fills it in.
    """

    format: int = FORMAT
    page_size: int
    num_pages: int
    prefix: Literal["radix", "none"]
    eviction: str
    policy: str
    seed: int
    limits: dict[str, Any]
    features: int
    lockstep: bool = False
    num_states: int = 0
    tenant_weights: dict[str, float] = {}
    started: str = ""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A step begins."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The step is over."""


class Now(msgspec.Struct, frozen=True, tag="now"):
    """The clock said this."""

    seconds: float


class Added(msgspec.Struct, frozen=True, tag="add"):
    """A request came in."""

    request: GenerateRequest | EmbedRequest


class Called(msgspec.Struct, frozen=True, tag="call"):
    """Another method of the scheduler was called."""

    method: Literal["abort", "stop_at", "release", "pause", "resume", "flush_cache", "audit"]
    arguments: tuple[Finish | str | int | None, ...] = ()


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A feature was asked about a request; the verdict's name, its refusal, or its guesses."""

    feature: int
    verdict: str | None = None
    draft: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    refusal: str | None = None


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """A batch was launched: (rid, start, stop, samples, guesses, pages) of each slice."""

    slices: tuple[tuple[str, int, int, bool, tuple[int, ...], tuple[int, ...]], ...]
    copies: tuple[tuple[int, int, int], ...]
    ended: tuple[str, ...]


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """What a step brought: (token ids, error, ended) of each slice; or why it failed as a whole.

    `short`: it did not fit into the device's memory.
    """

    outputs: tuple[tuple[tuple[int, ...], str, bool], ...] = ()
    failure: str | None = None
    short: bool = False


Event = Begin | End | Now | Added | Called | Asked | Decided | Brought


class Recorder:
    """Appends events to the record of one life. Not thread-safe, as the scheduler is not.

    Attributes:
        folder: Of this life.
    """

    def __init__(self, folder: Path, setup: Setup) -> None:
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
        if isinstance(event, End):
            self._file.flush()

    def close(self) -> None:
        """Finish the recording."""
        self._file.close()

    # ---- what the parts of a scheduler are wrapped in

    def clock(self, clock: Clock) -> Clock:
        """A clock whose answers are recorded."""

        def now() -> float:
            seconds = clock()
            self.write(Now(seconds))
            return seconds

        return now

    def feature(self, number: int, feature: Feature) -> Feature:
        """A feature whose answers are recorded."""
        return _RecordedFeature(self, number, feature)

    def executor(self, executor: Executor) -> Executor:
        """An executor whose batches and results are recorded."""
        return _RecordedExecutor(self, executor)


class _RecordedFeature(Feature):
    def __init__(self, recorder: Recorder, number: int, feature: Feature) -> None:
        self._recorder, self._number, self._feature = recorder, number, feature

    def poll(self) -> None:
        self._feature.poll()

    def on_batch(self, batch: Batch) -> None:
        self._feature.on_batch(batch)

    def on_start(self, piece: Slice) -> None:
        self._feature.on_start(piece)

    def on_tokens(self, req: Req, tokens: Sequence[int]) -> None:
        self._feature.on_tokens(req, tokens)

    def on_finish(self, req: Req) -> None:
        self._feature.on_finish(req)

    def gate(self, req: Req) -> Verdict:
        try:
            verdict = self._feature.gate(req)
        except RequestError as error:
            self._recorder.write(Asked(self._number, refusal=str(error)))
            raise
        self._recorder.write(Asked(self._number, verdict=verdict.name))
        return verdict

    def draft(self, req: Req) -> Draft | None:
        draft = self._feature.draft(req)
        made = (draft.tokens, draft.parents) if draft else None
        self._recorder.write(Asked(self._number, draft=made))
        return draft

    def holds(self, req: Req) -> bool:
        held = self._feature.holds(req)
        self._recorder.write(Asked(self._number, verdict=str(held)))
        return held


class _RecordedExecutor:
    def __init__(self, recorder: Recorder, executor: Executor) -> None:
        self.caps: ExecutorCaps = executor.caps
        self._recorder, self._executor = recorder, executor

    def launch(self, batch: Batch) -> Pending:
        self._recorder.write(decision(batch))
        return _RecordedPending(self._recorder, self._executor.launch(batch))

    def close(self) -> None:
        self._executor.close()


class _RecordedPending:
    def __init__(self, recorder: Recorder, pending: Pending) -> None:
        self._recorder, self._pending = recorder, pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> StepResult:
        try:
            result = self._pending.wait()
        except ExecutorError as error:
            short = isinstance(error, DeviceMemoryError)
            self._recorder.write(Brought(failure=str(error), short=short))
            raise
        outputs = tuple((tuple(map(int, o.token_ids)), o.error, o.ended) for o in result.outputs)
        self._recorder.write(Brought(outputs))
        return result


def decision(batch: Batch) -> Decided:
    """What a batch comes down to."""
    slices = [
        (
            s.req.rid,
            s.start,
            s.stop,
            s.samples,
            s.draft.tokens if s.draft else (),
            tuple(s.req.kv.view().tolist()) if s.req.kv else (),
        )
        for s in batch.slices
    ]
    return Decided(tuple(slices), batch.copies, batch.ended)


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


def read(folder: Path) -> tuple[Setup, Iterator[Event]]:
    """Open the record of one life; its events are read as they are asked for.

    Raises:
        ConfigError: there is none, or it is of another format.
    """
    try:
        setup = msgspec.json.decode((folder / SETUP).read_bytes(), type=Setup)
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
