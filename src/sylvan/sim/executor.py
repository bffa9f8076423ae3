"""An executor that computes nothing and takes the modelled time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.executor.api import ExecutorCaps, FinishedCommand
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.features import PlanShape, shape_of

TOKEN = 1
"""ID of every generated token: equal prompts are continued equally, as by greedy
decoding."""

StepTime = Callable[[PlanShape], float]


class TimedExecutor:
    """Advances the replica's clock when a step is awaited.

    With one step in flight, the model runs while it is awaited, as on a CPU. With more, it runs
    concurrently with the scheduler, one step after the other, as on a device.

    Args:
        caps: Capabilities of the recorded executor.
        clock: Clock of the replica.
        step_s: Returns the duration of a step.
        lazily: Whether the model runs when it is awaited.

    Attributes:
        shape: Shape of the last launched step.
        in_flight_s: Its duration.
        steps: Number of non-empty steps launched.
        rows: Number of tokens computed.
        max_rows: Largest number of rows of a step.
        busy_s: Total duration of steps.
        on_plan: Called with each plan.
        recorded: Result of each step, when following a recording; None: `TOKEN` for each
            request.
    """

    def __init__(
        self, caps: ExecutorCaps, clock: ReplicaClock, step_s: StepTime, *, lazily: bool
    ) -> None:
        self.caps = caps
        self.shape = PlanShape(0, 0, 0, 0, 0.0, 0)
        self.in_flight_s = 0.0
        self.steps = 0
        self.rows = self.max_rows = 0
        self.busy_s = 0.0
        self.on_plan: Callable[[StepPlan], None] | None = None
        self.recorded: Callable[[StepPlan], StepResult] | None = None
        self._clock, self._step_s, self._lazily = clock, step_s, lazily
        self._free_s = 0.0  # when the device has finished everything launched
        self._results: dict[int, StepResult] = {}

    def launch(self, plan: StepPlan) -> TimedStep:
        if self.on_plan is not None:
            self.on_plan(plan)
        shape = self.shape = shape_of(plan)
        seconds = self._step_s(shape)
        self.in_flight_s = seconds
        self.steps += shape.rows > 0
        self.rows += shape.rows
        self.max_rows = max(self.max_rows, shape.rows)
        self.busy_s += seconds
        result = self._result(shape.slices) if self.recorded is None else self.recorded(plan)
        if self._lazily:
            return TimedStep(self._clock, 0.0, seconds, result)
        self._free_s = max(self._free_s, self._clock.now_s) + seconds
        return TimedStep(self._clock, self._free_s, 0.0, result)

    def skip(self, steps: int, model_s: NDArray[np.float64]) -> TimedStep:
        """Skip to the last of several decode steps after that in flight, which took `model_s`."""
        shape = self.shape
        self.shape = shape._replace(context=shape.context + steps * shape.rows, starts=0)
        self.steps += steps
        self.rows += steps * shape.rows
        self.busy_s = float(np.cumsum([self.busy_s, *model_s])[-1])
        return TimedStep(self._clock, 0.0, float(model_s[-1]), self._result(shape.slices))

    def control(self, command: ExecutorCommand) -> FinishedCommand:
        return FinishedCommand(
            CommandResult(error="a simulated executor has neither weights nor memory")
        )

    def close(self) -> None:
        pass

    def _result(self, slices: int) -> StepResult:
        """Return a shared result: results are never modified, so one serves all steps of a size."""
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
