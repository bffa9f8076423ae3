"""Replays a recording through a real scheduler and finds the first decision that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.protocol.errors import (
    CapacityError,
    ConfigError,
    DeviceMemoryError,
    ExecutorError,
    RequestError,
)
from sylvan.protocol.messages import TokenOutput
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.core.req import Batch, Draft, Req, SliceOutput, StepResult
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.sched.feature import Feature, Verdict
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.recording import (
    Added,
    Asked,
    Begin,
    Brought,
    Called,
    Decided,
    End,
    Event,
    Now,
    Setup,
    decision,
    lives,
    read,
)
from sylvan.runtime.sched.scheduler import Scheduler


class DivergedError(Exception):
    """The scheduler asked for, or decided, something else than what was recorded."""


class ExhaustedError(DivergedError):
    """The scheduler asked for more than was recorded; so it must where a crash cut the record."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a replay got. `difference` is empty if all decisions were the same.

    `started`: when the recorded scheduler did. `cut`: the record ends inside a step.
    """

    steps: int
    requests: int
    tokens: int
    difference: str = ""
    started: str = ""
    cut: bool = False

    def __str__(self) -> str:
        """What follows the name of a life in a line for people."""
        since = f" (started {self.started})" if self.started else ""
        counts = f"{self.steps} steps, {self.requests} requests, {self.tokens} tokens"
        if self.difference:
            return f"{since}: differs after {counts}\n{self.difference}"
        end = "; its record ends inside the last of them" if self.cut else ""
        return f"{since}: the same decisions: {counts}{end}"


@dataclass(frozen=True, slots=True)
class _Moment:
    """A step or call, with all that happened within it; `whole` unless the record ends there."""

    first: Event
    within: Sequence[Event]
    whole: bool


def replay(folder: Path, until_step: int | None = None) -> Outcome:
    """Run the recorded inputs of one life through a new scheduler, at most `until_step` steps.

    Args:
        folder: Of that life, or of a recording with only one.
        until_step: None: all there are.

    Raises:
        ConfigError: there is no recording in `folder`, or one of several lives.
    """
    found = lives(folder)
    if len(found) > 1:
        names = ", ".join(life.name for life in found)
        raise ConfigError(f"{folder} holds several lives, to be replayed one by one: {names}")
    setup, events = read(found[0])
    tape = _Tape()
    scheduler = _scheduler(setup, tape)
    steps = requests = 0
    difference, cut = "", False
    for moment in _moments(events):
        steps += isinstance(moment.first, Begin)
        requests += isinstance(moment.first, Added)
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
    return Outcome(steps, requests, tape.tokens, difference, setup.started, cut)


def _moments(events: Iterator[Event]) -> Iterator[_Moment]:
    moment: list[Event] = []
    ended = False
    for event in events:
        if isinstance(event, Begin | Added | Called) and moment:
            yield _Moment(moment[0], moment[1:], whole=True)
            moment = []
        ended = isinstance(event, End)
        if not ended:
            moment.append(event)
    if moment:
        yield _Moment(moment[0], moment[1:], whole=ended)


def _apply(scheduler: Scheduler, event: Event) -> None:
    match event:
        case Begin():
            scheduler.step()
        case Added(request=request):
            try:
                scheduler.add(request)
            except (RequestError, CapacityError):
                return  # refused then as now
        case Called(method=method, arguments=arguments):
            getattr(scheduler, method)(*arguments)
        case _:
            raise DivergedError(f"the recording begins a moment with {type(event).__name__}")


def _scheduler(setup: Setup, tape: _Tape) -> Scheduler:
    sizes = setup.num_pages, setup.page_size
    cache = kv_cache(*sizes, setup.prefix, setup.eviction, setup.num_states)
    parts = Parts(
        cache=cache,
        executor=_TapeExecutor(tape, setup.lockstep),
        policy=schedule_policy(setup.policy),
        emit=tape.emit,
        features=tuple(_TapeFeature(tape, n) for n in range(setup.features)),
        clock=tape.now,
        seed=setup.seed,
        tenant_weights=setup.tenant_weights,
    )
    return Scheduler(parts, Limits(**setup.limits))


class _Tape:
    """The answers recorded for the present moment, by who gives them."""

    def __init__(self) -> None:
        self.tokens = 0
        self._times: deque[float] = deque()
        self._asked: deque[Asked] = deque()
        self._decided: deque[Decided] = deque()
        self._brought: deque[Brought] = deque()

    def load(self, within: Sequence[Event]) -> None:
        for event in within:
            match event:
                case Now(seconds=seconds):
                    self._times.append(seconds)
                case Asked():
                    self._asked.append(event)
                case Decided():
                    self._decided.append(event)
                case Brought():
                    self._brought.append(event)
                case _:
                    raise DivergedError(f"{type(event).__name__} inside a step")

    def now(self) -> float:
        if not self._times:
            raise ExhaustedError("the clock is asked more often than it was")
        return self._times.popleft()

    def asked(self, feature: int) -> Asked:
        if not self._asked:
            raise ExhaustedError(f"feature {feature} is asked more often than it was")
        if self._asked[0].feature != feature:
            raise DivergedError(f"feature {feature} is asked where it was not")
        return self._asked.popleft()

    def launched(self, batch: Batch) -> None:
        got = decision(batch)
        if not self._decided:
            raise ExhaustedError(f"a batch is launched that was not: {_brief(got)}")
        want = self._decided.popleft()
        if got != want:
            raise DivergedError(f"decided {_brief(got)}, recorded {_brief(want)}")

    def result(self) -> StepResult:
        if not self._brought:
            raise ExhaustedError("a result is awaited that was not")
        brought = self._brought.popleft()
        if brought.failure is not None:
            raise (DeviceMemoryError if brought.short else ExecutorError)(brought.failure)
        outputs = brought.outputs
        return StepResult(
            [SliceOutput(ids, error=error, ended=ended) for ids, error, ended in outputs]
        )

    def emit(self, outputs: Sequence[TokenOutput]) -> None:
        self.tokens += sum(len(o.token_ids) for o in outputs)

    def finish(self) -> None:
        """Check that the moment was used up."""
        if self._decided:
            raise DivergedError(f"a batch is missing: {_brief(self._decided[0])}")
        if self._times or self._asked or self._brought:
            raise DivergedError("fewer questions are asked than were")


class _TapeFeature(Feature):
    def __init__(self, tape: _Tape, number: int) -> None:
        self._tape, self._number = tape, number

    def gate(self, req: Req) -> Verdict:
        asked = self._tape.asked(self._number)
        if asked.refusal is not None:
            raise RequestError(asked.refusal)
        return Verdict[asked.verdict or ""]

    def draft(self, req: Req) -> Draft | None:
        made = self._tape.asked(self._number).draft
        return Draft(*made) if made else None

    def holds(self, req: Req) -> bool:
        return self._tape.asked(self._number).verdict == "True"


class _TapeExecutor:
    def __init__(self, tape: _Tape, lockstep: bool) -> None:
        self.caps = ExecutorCaps(max_batch_tokens=2**31, max_running_reqs=2**31, lockstep=lockstep)
        self._tape = tape

    def launch(self, batch: Batch) -> _TapePending:
        self._tape.launched(batch)
        return _TapePending(self._tape)

    def close(self) -> None:
        """See `Executor.close`."""


class _TapePending:
    def __init__(self, tape: _Tape) -> None:
        self._tape = tape

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._tape.result()


def _brief(batch: Decided) -> str:
    slices = ", ".join(f"{rid}[{start}:{stop}]" for rid, start, stop, *_ in batch.slices[:8])
    more = f" and {len(batch.slices) - 8} more" if len(batch.slices) > 8 else ""
    pages = [pages for *_, pages in batch.slices[:2]]
    return f"{slices or 'nothing'}{more} on pages {pages}, copies {batch.copies[:4]}"
