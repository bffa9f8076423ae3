"""Feeds a replica the requests, times and tokens of a recording, and compares its steps.

`sylvan replay` asks whether the scheduler still decides as it did. This asks whether a simulated
replica, with its own loop, clock and executor, is that scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.features.flight_recorder.recording import (
    Called,
    Completed,
    Ended,
    Event,
    Now,
    Planned,
    RequestAdded,
    planned,
    read,
)
from sylvan.sim.cost import HostCost, NoisyStepTimes, StepCost
from sylvan.sim.features import SEGMENTS, PlanShape
from sylvan.sim.observed import engine_of
from sylvan.sim.replica import SimulatedReplica


@dataclass(slots=True)
class Followed:
    """How far a replica took the recorded steps. `difference` is empty if it took all."""

    steps: int = 0
    requests: int = 0
    difference: str = ""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the scheduler's step.

    Attributes:
        begin_s: When it began.
        plans: That it launched.
        arrivals: Requests that came before it.
    """

    begin_s: float
    plans: tuple[Planned, ...]
    arrivals: tuple[GenerateRequest, ...]


def follow(folder: Path) -> Followed:
    """Have a replica do what was recorded in one run, without aborts and pauses.

    Raises:
        ConfigError: There is no recording.
    """
    setup, events = read(folder)
    tape = _Tape([*events])
    replica = SimulatedReplica(engine_of(setup), tape, skips=False)
    got: list[StepPlan] = []
    replica.executor.on_plan = got.append
    replica.executor.recorded = tape.answer
    found = Followed()
    for call in tape.calls():
        for request in call.arrivals:
            replica.deliver(request, call.begin_s)
        found.requests += len(call.arrivals)
        replica.clock.now_s = call.begin_s
        got.clear()
        replica.run()
        found.steps += 1
        plans = tuple(planned(plan) for plan in got)
        if plans != call.plans:
            found.difference = f"step {found.steps}: planned {plans}, recorded {call.plans}"
            break
    return found


class _Tape(NoisyStepTimes):
    """The recorded times and tokens, instead of modelled ones."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(
            StepCost(constant=0.0, rows=(0.0,) * SEGMENTS), HostCost(constant=0.0), None
        )
        self._calls: list[_Call] = []
        self._seconds: list[float] = []  # of each step launched
        self._results: list[Completed] = []
        self._launched = -1
        self._read(iter(events))

    def calls(self) -> list[_Call]:
        """All calls, in order."""
        return self._calls

    def step_s(self, shape: PlanShape) -> float:
        """See `NoisyStepTimes.step_s`: of the next step."""
        del shape
        self._launched += 1
        return self._seconds[self._launched] if self._launched < len(self._seconds) else 0.0

    def host_s(self, shape: PlanShape) -> float:
        """Called when a call begins."""
        del shape
        return 0.0

    def answer(self, plan: StepPlan) -> StepResult:
        """Result of the most recent step."""
        del plan
        if self._launched >= len(self._results):
            return StepResult()
        found = self._results[self._launched]
        others = {
            index: SliceOutput(ids, error=error, status=status, ended=ended, accepted=accepted)
            for index, ids, error, status, ended, accepted in found.others
        }
        return StepResult(found.tokens, others)

    def _read(self, events: Iterator[Event]) -> None:
        arrivals: list[GenerateRequest] = []
        for event in events:
            if isinstance(event, RequestAdded) and isinstance(event.request, GenerateRequest):
                arrivals.append(event.request)
            elif isinstance(event, Called) and event.method == "step":
                self._calls.append(self._call(events, tuple(arrivals)))
                arrivals.clear()

    def _call(self, events: Iterator[Event], arrivals: tuple[GenerateRequest, ...]) -> _Call:
        begin_s: float | None = None
        completed = False
        plans: list[Planned] = []
        for event in events:
            match event:
                case Now(seconds=seconds) if begin_s is None:
                    begin_s = seconds
                case Now(seconds=seconds) if completed:
                    self._seconds.append(seconds - (begin_s or 0.0))
                    completed = False
                case Completed():
                    completed = True
                    self._results.append(event)
                case Planned():
                    plans.append(event)
                case Ended():
                    break
                case _:
                    pass
        return _Call(begin_s or 0.0, tuple(plans), arrivals)
