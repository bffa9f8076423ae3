"""The flight recorder: observes the scheduler without changing its path."""

from __future__ import annotations

from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.core.review import Review
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.features.flight_recorder.recording import (
    Called,
    CapabilitiesAnswered,
    Ended,
    Now,
    Recorder,
    RequestAdded,
    completed,
    planned,
)
from sylvan.runtime.sched.capability import Observer, Verdict
from sylvan.utils.clock import Clock


class FlightRecorder(Observer):
    """Writes inputs, answers, plans and results to a `Recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def clock(self, clock: Clock) -> Clock:
        """A clock whose readings are recorded; the scheduler must use it."""

        def now() -> float:
            seconds = clock()
            self._recorder.write(Now(seconds))
            return seconds

        return now

    def on_call(self, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "add":
            self._recorder.write(RequestAdded(*arguments))
        else:
            self._recorder.write(Called(method, arguments))  # pyright: ignore[reportArgumentType]

    def on_decision(self, question: str, req: Req | None, answer: Any) -> None:
        refusal = None
        if isinstance(answer, RequestError):
            answer, refusal = None, str(answer)
        elif isinstance(answer, Verdict):
            answer = answer.name
        elif isinstance(answer, Draft):
            answer = answer.tokens, answer.parents
        elif isinstance(answer, Review):
            answer = (answer.kept,), (answer.final,)
        elif question == "cut":
            answer = (answer,), ()
        rid = "" if req is None else req.rid
        self._recorder.write(CapabilitiesAnswered(question, rid, answer, refusal))  # pyright: ignore[reportArgumentType]

    def on_plan(self, plan: StepPlan) -> None:
        self._recorder.write(planned(plan))

    def on_completed(self, result: StepResult | Exception) -> None:
        self._recorder.write(completed(result))

    def on_step_end(self) -> None:
        self._recorder.write(Ended())

    def close(self) -> None:
        """Finish the recording."""
        self._recorder.close()
