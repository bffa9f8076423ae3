"""An executor that computes nothing and takes the modelled time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.executor.api import Carried, ExecutorCaps
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.features import PlanShape, shape_of

TOKEN = 1
"""The id of all that is generated: the same prompt is continued the same way, as by greedy
decoding."""

StepTime = Callable[[PlanShape], float]


class TimedExecutor:
    """Moves the replica's clock when a step is waited for.

    With one step in flight the model runs when it is waited for, as on a CPU. With more it runs
    beside the scheduler, one step after the other, as on a device.

    Args:
        caps: Of the executor that was recorded.
        clock: Of the replica.
        step_s: Seconds of a step.
        lazily: Whether the model runs when it is waited for.

    Attributes:
        shape: Of the step launched last.
        in_flight_s: Seconds of the step launched last.
        steps: Launched so far that computed something.
        rows: Tokens computed so far.
        most_rows: Of one step.
        busy_s: Time that steps took.
        on_plan: Told of each plan.
        answers: What each step brings, as when a recording is followed; None: `TOKEN` for each
            request.
    """

    def __init__(
        self, caps: ExecutorCaps, clock: ReplicaClock, step_s: StepTime, *, lazily: bool
    ) -> None:
        self.caps = caps
        self.shape = PlanShape(0, 0, 0, 0, 0.0, 0)
        self.in_flight_s = 0.0
        self.steps = 0
        self.rows = self.most_rows = 0
        self.busy_s = 0.0
        self.on_plan: Callable[[StepPlan], None] | None = None
        self.answers: Callable[[StepPlan], StepResult] | None = None
        self._clock, self._step_s, self._lazily = clock, step_s, lazily
        self._free_s = 0.0  # when the device has done all that was launched
        self._results: dict[int, StepResult] = {}

    def launch(self, plan: StepPlan) -> TimedStep:
        if self.on_plan is not None:
            self.on_plan(plan)
        shape = self.shape = shape_of(plan)
        seconds = self._step_s(shape)
        self.in_flight_s = seconds
        self.steps += shape.rows > 0
        self.rows += shape.rows
        self.most_rows = max(self.most_rows, shape.rows)
        self.busy_s += seconds
        result = self._result(shape.slices) if self.answers is None else self.answers(plan)
        if self._lazily:
            return TimedStep(self._clock, 0.0, seconds, result)
        self._free_s = max(self._free_s, self._clock.now_s) + seconds
        return TimedStep(self._clock, self._free_s, 0.0, result)

    def skip(self, steps: int, model_s: NDArray[np.float64]) -> TimedStep:
        """The last of so many steps of decodes after the one in flight, which took `model_s`."""
        shape = self.shape
        self.shape = shape._replace(context=shape.context + steps * shape.rows, starts=0)
        self.steps += steps
        self.rows += steps * shape.rows
        self.busy_s = float(np.cumsum([self.busy_s, *model_s])[-1])
        return TimedStep(self._clock, 0.0, float(model_s[-1]), self._result(shape.slices))

    def control(self, command: ExecutorCommand) -> Carried:
        return Carried(CommandResult(error="a simulated executor has neither weights nor memory"))

    def close(self) -> None:
        pass

    def _result(self, slices: int) -> StepResult:
        """Nobody changes a result, so that one serves for all steps of a size."""
        found = self._results.get(slices)
        if found is None:
            found = self._results[slices] = StepResult((TOKEN,) * slices)
        return found


class TimedStep:
    """Implements `Pending`."""

    __slots__ = ("_clock", "_done_s", "_result", "_seconds")

    def __init__(
        self, clock: ReplicaClock, done_s: float, seconds: float, result: StepResult
    ) -> None:
        self._clock, self._done_s, self._seconds, self._result = clock, done_s, seconds, result

    def done(self) -> bool:
        return self._clock.now_s >= self._done_s

    def wait(self) -> StepResult:
        self._clock.advance(self._seconds)
        self._clock.reach(self._done_s)
        return self._result
