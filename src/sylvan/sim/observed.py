"""Extracts timing from a flight recording: each step's shape and duration, and all requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.features.flight_recorder.recording import (
    Called,
    CapabilitiesAnswered,
    Completed,
    Ended,
    Event,
    Now,
    Planned,
    RequestAdded,
    SchedulerSetup,
    read,
    runs,
)
from sylvan.sim.features import PlanShape, shape
from sylvan.sim.profile import SchedulerProfile

NOT_SIMULATED = {
    "draft": "speculation",
    "holds": "prefill and decode on different servers",
    "stop_loading": "KV tiers",
    "review": "guarded grammars",
}
"""Questions that only occur with features that the simulation does not support."""


@dataclass(frozen=True, slots=True)
class TimedShape:
    """A shape, and its duration in seconds."""

    shape: PlanShape
    seconds: float


@dataclass(slots=True)
class Observed:
    """One run of a scheduler.

    Attributes:
        folder: Folder of the run.
        setup: Setup of the scheduler.
        steps: Durations of the model's part of steps.
        hosts: Durations between them: from the end of one step's model part to the start of the
            next, if the loop did not wait. The shape is that of the step planned then.
        requests: With the times at which they reached the scheduler.
        first_s: When the first token of each request was there, by its ID.
    """

    folder: Path
    setup: SchedulerSetup
    steps: list[TimedShape] = field(default_factory=list[TimedShape])
    hosts: list[TimedShape] = field(default_factory=list[TimedShape])
    requests: list[tuple[float, GenerateRequest]] = field(
        default_factory=list[tuple[float, GenerateRequest]]
    )
    first_s: dict[str, float] = field(default_factory=dict[str, float])


def observe(name: str) -> Observed:
    """Read a recording of one run.

    Raises:
        ConfigError: There is none, it has several runs, or uses unsupported features.
    """
    found = runs(Path(name).expanduser())
    if len(found) > 1:
        names = ", ".join(str(run) for run in found)
        raise ConfigError(f"{name} holds several runs; give one of {names}")
    setup, events = read(found[0])
    observed = Observed(found[0], setup)
    _Reader(observed).read(events)
    if not observed.steps:
        raise ConfigError(f"{found[0]} holds no step")
    return observed


def engine_of(setup: SchedulerSetup) -> SchedulerProfile:
    """Return how the recorded scheduler was built."""
    return SchedulerProfile(
        kv_groups=setup.kv_groups,
        prefix=setup.prefix,
        eviction=setup.eviction,
        policy=setup.policy,
        settings=setup.limits,
        num_slots=setup.num_slots or 1 << 16,
        lockstep=setup.lockstep,
        max_samples=setup.max_samples,
        seed=setup.seed,
        tenant_weights=setup.tenant_weights,
    )


class _Launched(NamedTuple):
    """A step in flight: its launch time, and the requests of which it samples the first token."""

    shape: PlanShape
    launched_s: float
    firsts: Sequence[str]


class _Reader:
    """Follows the scheduler's loop through a recording.

    The clock is read first when a step begins, and next, if a result was awaited, when it
    arrives. With one step in flight the model runs in between; with more it has run since it was
    launched, or since the step before ended.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._overlaps = observed.setup.limits.get("inflight", 1) > 1
        self._plans: deque[_Launched] = deque()  # in flight
        self._slots: dict[int, str] = {}  # request IDs
        self._prompts: dict[str, int] = {}  # lengths, until the first token is planned
        self._now_s = 0.0
        self._begin_s: float | None = None  # of the step call
        self._planned: PlanShape | None = None  # by it
        self._waited_s: float | None = None  # when its result arrived
        self._done_s = 0.0  # when the newest result arrived
        self._completing = False
        self._before: tuple[PlanShape, float] | None = None  # a plan, and when the model finished

    def read(self, events: Iterator[Event]) -> None:
        for event in events:
            match event:
                case RequestAdded(request=request):
                    self._add(request, next(events, None))
                case Called(method="step"):
                    self._begin_s = self._waited_s = self._planned = None
                case Called() | CapabilitiesAnswered():
                    self._check(event)
                case Now(seconds=seconds):
                    self._now(seconds)
                case Completed():
                    self._completing = True
                case Planned():
                    self._planned = self._launch(event)
                case Ended():
                    self._end()

    def _add(self, request: object, following: Event | None) -> None:
        if not isinstance(request, GenerateRequest):
            raise self._unknown("embedding requests")
        if isinstance(following, Now):  # otherwise it was rejected
            self._observed.requests.append((following.seconds, request))
            self._prompts[request.rid] = len(request.input_ids)
            self._now_s = following.seconds

    def _check(self, event: Called | CapabilitiesAnswered) -> None:
        """Reject recordings with unsupported features."""
        if isinstance(event, Called):
            if event.method in ("loaded", "load_failed", "release"):
                raise self._unknown("requests that load KV")
        elif event.answer and event.question in NOT_SIMULATED:
            raise self._unknown(NOT_SIMULATED[event.question])

    def _unknown(self, what: str) -> ConfigError:
        return ConfigError(f"{self._observed.folder}: {what} cannot be simulated; record without")

    def _now(self, seconds: float) -> None:
        self._now_s = seconds
        if self._begin_s is None:
            self._begin_s = seconds
            self._between(seconds)
        elif self._completing:
            self._completing = False
            self._complete(seconds)

    def _between(self, begin_s: float) -> None:
        """Record the host's time since the model's previous part, unless the loop waited."""
        if self._before is None:
            return
        shape, done_s = self._before
        self._before = None
        if shape.rows:
            self._observed.hosts.append(TimedShape(shape, begin_s - done_s))

    def _complete(self, seconds: float) -> None:
        shape, launched_s, firsts = self._plans.popleft()
        self._observed.first_s.update(dict.fromkeys(firsts, seconds))
        began_s = self._begin_s or 0.0
        if self._overlaps:
            began_s = max(launched_s, self._done_s)
        self._done_s = self._waited_s = seconds
        if shape.rows:
            self._observed.steps.append(TimedShape(shape, seconds - began_s))

    def _launch(self, plan: Planned) -> PlanShape:
        count = plan.num_slices
        numbers = np.frombuffer(plan.numbers, np.int32)
        starts, stops = numbers[count : 2 * count], numbers[2 * count : 3 * count]
        self._slots.update((slot, rid) for slot, rid, _ in plan.joins)
        rows = int((stops - starts).sum())
        # slices that sample: what remains of the numbers besides slots, positions and IDs; steps in
        # flight have rows of their own there, two numbers each
        samples = count if rows == count else min(count, len(numbers) - 3 * count - rows)
        found = shape(numbers, rows, count, samples, len(plan.joins))
        self._plans.append(_Launched(found, self._now_s, self._firsts(numbers[:count], stops)))
        return found

    def _firsts(self, slots: NDArray[np.int32], stops: NDArray[np.int32]) -> list[str]:
        """Return the requests whose prompts end in a step."""
        if not self._prompts:
            return []
        found: list[str] = []
        for slot, stop in zip(slots.tolist(), stops.tolist(), strict=True):
            rid = self._slots.get(slot, "")
            if stop >= self._prompts.get(rid, stop + 1):
                del self._prompts[rid]
                found.append(rid)
        return found

    def _end(self) -> None:
        """The host's part lasts until the next step begins."""
        launched = self._planned
        done_s = self._waited_s if self._waited_s is not None else self._begin_s
        if launched is not None and done_s is not None:
            self._before = (launched, done_s)
