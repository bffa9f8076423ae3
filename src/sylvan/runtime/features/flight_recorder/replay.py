"""Replays a recording through a real scheduler and finds the first decision that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.protocol.errors import (
    CapacityError,
    ConfigError,
    DeviceMemoryError,
    ExecutorError,
    RequestError,
)
from sylvan.protocol.messages import TokenOutput
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.core.review import Review
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.api import ExecutorCaps, FinishedCommand
from sylvan.runtime.features.embeddings.control import NoEmbeddings
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
    planned,
    read,
    runs,
)
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler

PORT_CALLS = frozenset({"loaded", "load_failed", "release"})


class DivergedError(Exception):
    """The scheduler asked or decided something other than what was recorded."""


class ExhaustedError(DivergedError):
    """The scheduler asked for more than was recorded, as expected where a crash cut the record."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. `difference` is empty if all decisions matched.

    `started`: start time of the recorded scheduler. `cut`: the record ends inside a step.
    """

    steps: int
    requests: int
    tokens: int
    difference: str = ""
    started: str = ""
    cut: bool = False

    def __str__(self) -> str:
        """Format the result for people, without the name of the run."""
        since = f" (started {self.started})" if self.started else ""
        counts = f"{self.steps} steps, {self.requests} requests, {self.tokens} tokens"
        if self.difference:
            return f"{since}: differs after {counts}\n{self.difference}"
        end = "; its record ends inside the last of them" if self.cut else ""
        return f"{since}: the same decisions: {counts}{end}"


@dataclass(frozen=True, slots=True)
class _Moment:
    """One step or call with its events; `whole` unless the record ends inside it."""

    first: Event
    within: Sequence[Event]
    whole: bool


def replay(folder: Path, until_step: int | None = None) -> ReplayResult:
    """Feed the recorded inputs of one run to a new scheduler, for at most `until_step` steps.

    Args:
        folder: Folder of the run, or of a recording with a single run.
        until_step: None: all steps.

    Raises:
        ConfigError: There is no recording in `folder`, or one of several runs.
    """
    found = runs(folder)
    if len(found) > 1:
        names = ", ".join(run.name for run in found)
        raise ConfigError(f"{folder} holds several runs, to be replayed one by one: {names}")
    setup, events = read(found[0])
    tape = _Tape()
    scheduler = _scheduler(setup, tape)
    steps = requests = 0
    difference, cut = "", False
    for moment in _by_moment(events):
        steps += _begins_step(moment.first)
        requests += isinstance(moment.first, RequestAdded)
        try:
            tape.load(moment.within)
            _apply(scheduler, moment.first)
            tape.finish()
        except DivergedError as error:
            cut = isinstance(error, ExhaustedError) and not moment.whole
            difference = "" if cut else f"step {steps}: {error}"
            break
        if until_step is not None and steps >= until_step:
            break
    return ReplayResult(steps, requests, tape.tokens, difference, setup.started, cut)


def _begins_step(event: Event) -> bool:
    return isinstance(event, Called) and event.method == "step"


def _by_moment(events: Iterator[Event]) -> Iterator[_Moment]:
    moment: list[Event] = []
    ended = in_step = False
    for event in events:
        if isinstance(event, RequestAdded | Called) and not in_step and moment:
            yield _Moment(moment[0], moment[1:], whole=True)
            moment = []
        in_step = (in_step or _begins_step(event)) and not isinstance(event, Ended)
        ended = isinstance(event, Ended)
        if not ended:
            moment.append(event)
    if moment:
        yield _Moment(moment[0], moment[1:], whole=ended)


def _apply(scheduler: Scheduler, event: Event) -> None:
    match event:
        case RequestAdded(request=request):
            try:
                scheduler.add(request)
            except (RequestError, CapacityError):
                return  # rejected then as now
        case Called(method=method, arguments=arguments):
            owner = scheduler.port if method in PORT_CALLS else scheduler
            getattr(owner, method)(*arguments)
        case _:
            raise DivergedError(f"the recording begins a moment with {type(event).__name__}")


def _scheduler(setup: SchedulerSetup, tape: _Tape) -> Scheduler:
    cache = kv_cache(setup.kv_groups, setup.prefix, setup.eviction)
    standard = standard_capabilities(
        cache, makes_vectors=setup.makes_vectors, pools_all=setup.pools_all
    )
    # the answers of gates are on the tape
    silent = tuple(c for c in standard if not isinstance(c, NoEmbeddings))
    parts = SchedulerDeps(
        cache=cache,
        executor=_TapeExecutor(tape, setup),
        policy=schedule_policy(setup.policy),
        emit=tape.emit,
        capabilities=(_tape_capability(tape, setup.questions), *silent),
        clock=tape.now,
        seed=setup.seed,
        tenant_weights=setup.tenant_weights,
    )
    return Scheduler(parts, SchedulerLimits(**setup.limits))


class _Tape:
    """The recorded answers of the current step or call, by source."""

    def __init__(self) -> None:
        self.tokens = 0
        self.port_calls: deque[Called] = deque()
        self._times: deque[float] = deque()
        self._answers: deque[CapabilitiesAnswered] = deque()
        self._plans: deque[Planned] = deque()
        self._results: deque[Completed] = deque()

    def load(self, within: Sequence[Event]) -> None:
        for event in within:
            match event:
                case Now(seconds=seconds):
                    self._times.append(seconds)
                case CapabilitiesAnswered():
                    self._answers.append(event)
                case Planned():
                    self._plans.append(event)
                case Completed():
                    self._results.append(event)
                case Called(method=method) if method in PORT_CALLS:
                    self.port_calls.append(event)
                case _:
                    raise DivergedError(f"{type(event).__name__} inside a step")

    def now(self) -> float:
        if not self._times:
            raise ExhaustedError("the clock is asked more often than it was")
        return self._times.popleft()

    def answer(self, question: str, req: Req | None = None) -> Any:
        rid = "" if req is None else req.rid
        asked = f"{question} of {rid!r}"
        if not self._answers:
            raise ExhaustedError(f"{asked} is asked, but was not")
        recorded = self._answers.popleft()
        if (recorded.question, recorded.rid) != (question, rid):
            raise DivergedError(
                f"{asked} is asked, recorded {recorded.question} of {recorded.rid!r}"
            )
        if recorded.refusal is not None:
            raise RequestError(recorded.refusal)
        return recorded.answer

    def launched(self, plan: StepPlan) -> None:
        got = planned(plan)
        if not self._plans:
            raise ExhaustedError(f"a step is launched that was not: {_summary(got)}")
        want = self._plans.popleft()
        if got != want:
            raise DivergedError(f"planned {_summary(got)}, recorded {_summary(want)}")

    def result(self) -> StepResult:
        if not self._results:
            raise ExhaustedError("a result is awaited that was not")
        recorded = self._results.popleft()
        if recorded.failure is not None:
            raise (DeviceMemoryError if recorded.short else ExecutorError)(recorded.failure)
        others = {
            index: SliceOutput(ids, error=error, status=status, ended=ended, accepted=accepted)
            for index, ids, error, status, ended, accepted in recorded.others
        }
        return StepResult(recorded.tokens, others)

    def emit(self, outputs: Sequence[TokenOutput]) -> None:
        self.tokens += sum(len(o.token_ids) for o in outputs)

    def finish(self) -> None:
        """Check that all answers were consumed."""
        if self._plans:
            raise DivergedError(f"a step is missing: {_summary(self._plans[0])}")
        if self._times or self._answers or self._results or self.port_calls:
            raise DivergedError("fewer questions are asked than were")


class _TapePort(Capability):
    """Replays what capabilities did to requests; subclasses replay their answers."""

    def __init__(self, tape: _Tape) -> None:
        self._tape = tape
        self._port: SchedulerPort | None = None

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def poll(self) -> None:
        while self._tape.port_calls:
            call = self._tape.port_calls.popleft()
            getattr(self._port, call.method)(*call.arguments)


def _tape_capability(tape: _Tape, questions: Sequence[str]) -> Capability:
    """Make a capability with these questions only: the presence of a hook changes the path."""

    def verdict(question: str, req: Req) -> Verdict:
        answer = tape.answer(question, req)
        if isinstance(answer, bool):
            return Verdict.READY if answer else Verdict.WAIT
        return Verdict[answer]

    def draft(req: Req, limit: int) -> Draft | None:
        del limit
        drafted = tape.answer("draft", req)
        return Draft(*drafted) if drafted else None

    def review(req: Req) -> Review:
        (kept,), (final,) = tape.answer("review", req)
        return Review(kept, final)

    hooks: dict[str, Any] = {
        "gate": lambda self, req: verdict("gate", req),
        "admit": lambda self, req, admitted: verdict("admit", req),
        "may_draft": lambda self: tape.answer("may_draft"),
        "draft": lambda self, req, limit: draft(req, limit),
        "cut": lambda self, req, size, limit: tape.answer("cut", req)[0][0],
        "holds": lambda self, req: tape.answer("holds", req),
        "stop_loading": lambda self, req: tape.answer("stop_loading", req),
        "wants_step": lambda self: tape.answer("wants_step", None),
        "reviews": lambda self, req: req.review is not None or tape.answer("reviews", req),
        "review": lambda self, req, count, complete: review(req),
    }
    body = {name: hooks[name] for name in questions if name in hooks}
    body["gates_running"] = "running gate" in questions
    return cast(Capability, type("_TapeCapability", (_TapePort,), body)(tape))


class _TapeExecutor:
    def __init__(self, tape: _Tape, setup: SchedulerSetup) -> None:
        self.caps = ExecutorCaps(
            max_batch_tokens=2**31,
            max_running_reqs=setup.num_slots or 2**16,
            lockstep=setup.lockstep,
            stages=setup.stages,
            max_samples=setup.max_samples,
            draft_chains=setup.draft_chains,
            draft_trees=setup.draft_trees,
        )
        self._tape = tape

    def launch(self, plan: StepPlan) -> _TapePending:
        self._tape.launched(plan)
        return _TapePending(self._tape)

    def control(self, command: ExecutorCommand) -> FinishedCommand:
        """Ignore commands: their effects on the scheduler are on the tape."""
        return FinishedCommand(CommandResult(error="a recording has neither weights nor memory"))

    def close(self) -> None:
        pass


class _TapePending:
    def __init__(self, tape: _Tape) -> None:
        self._tape = tape

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._tape.result()


def _summary(plan: Planned) -> str:
    count = plan.num_slices
    numbers = np.frombuffer(plan.numbers, np.int32)
    slots, starts, stops = (numbers[i * count : (i + 1) * count].tolist() for i in range(3))
    parts = [f"slot {s}[{a}:{b}]" for s, a, b in zip(slots, starts, stops, strict=True)]
    more = f" and {count - 8} more" if count > 8 else ""
    joins = ", ".join(f"{rid} in slot {slot}" for slot, rid, _ in plan.joins[:8]) or "none"
    pages = np.frombuffer(plan.pages, np.int32).reshape(4, -1)[:, :4].T.tolist()
    slices = ", ".join(parts[:8]) or "nothing"
    return f"{slices}{more}; joining: {joins}; pages {pages}, copies {plan.copies[:4]}"
