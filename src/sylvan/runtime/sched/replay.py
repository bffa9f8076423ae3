"""Replays a recording through a real scheduler and finds the first decision that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.protocol.errors import (
    CapacityError,
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
    read,
)
from sylvan.runtime.sched.scheduler import Scheduler


class DivergedError(Exception):
    """The scheduler asked for, or decided, something else than what was recorded."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a replay got. `difference` is empty if all decisions were the same."""

    steps: int
    requests: int
    tokens: int
    difference: str = ""


def replay(folder: Path, until_step: int | None = None) -> Outcome:
    """Run the recorded inputs through a new scheduler, at most `until_step` steps.

    Raises:
        ConfigError: there is no recording in `folder`.
    """
    setup, events = read(folder)
    tape = _Tape()
    scheduler = _scheduler(setup, tape)
    steps = requests = 0
    for moment in _moments(events):
        tape.load(moment)
        first = moment[0]
        steps += isinstance(first, Begin)
        requests += isinstance(first, Added)
        try:
            _apply(scheduler, first)
            tape.finish()
        except DivergedError as error:
            difference = f"step {steps}: {error}"
            return Outcome(steps, requests, tape.tokens, difference)
        if until_step is not None and steps >= until_step:
            break
    return Outcome(steps, requests, tape.tokens)


def _moments(events: Iterator[Event]) -> Iterator[list[Event]]:
    """Group events: a step or call, with all that happened within it."""
    moment: list[Event] = []
    for event in events:
        if isinstance(event, Begin | Added | Called) and moment:
            yield moment
            moment = []
        if not isinstance(event, End):
            moment.append(event)
    if moment:
        yield moment


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

    def load(self, moment: Sequence[Event]) -> None:
        for event in moment[1:]:
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
            raise DivergedError("the clock is asked more often than it was")
        return self._times.popleft()

    def asked(self, feature: int) -> Asked:
        if not self._asked or self._asked[0].feature != feature:
            raise DivergedError(f"feature {feature} is asked where it was not")
        return self._asked.popleft()

    def launched(self, batch: Batch) -> None:
        got = decision(batch)
        if not self._decided:
            raise DivergedError(f"a batch is launched that was not: {_brief(got)}")
        want = self._decided.popleft()
        if got != want:
            raise DivergedError(f"decided {_brief(got)}, recorded {_brief(want)}")

    def result(self) -> StepResult:
        if not self._brought:
            raise DivergedError("a result is awaited that was not")
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
