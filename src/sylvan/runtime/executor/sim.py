"""A simulated executor: drives the real scheduler with a cost model and virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.api import ExecutorCaps, FinishedCommand

SimRequest = GenerateRequest | EmbedRequest


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose result is known."""

    result: StepResult

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class SimExecutor:
    """Emits scripted tokens and advances a virtual clock by the modelled step time."""

    def __init__(
        self,
        next_token: Callable[[SimRequest, int], int],
        step_time_s: Callable[[StepPlan], float],
        caps: ExecutorCaps | None = None,
    ) -> None:
        """`next_token(request, position)` returns the id of the token at `position`."""
        self.caps = caps or ExecutorCaps(max_batch_tokens=8192, max_running_reqs=256)
        self.now_s = 0.0
        self.steps = 0
        self.computed_tokens = 0
        self._next_token = next_token
        self._step_time_s = step_time_s
        self._requests: dict[int, SimRequest] = {}  # by slot

    def launch(self, plan: StepPlan) -> CompletedStep:
        """Account for the step and return its tokens."""
        for join in plan.joins:
            self._requests[join.slot] = join.request
        self.now_s += self._step_time_s(plan)
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        requests, next_token = self._requests, self._next_token
        places = zip(plan.slots.tolist(), plan.stops.tolist(), strict=True)
        if plan.num_samples == plan.num_slices:
            return CompletedStep(
                StepResult([next_token(requests[slot], stop) for slot, stop in places])
            )
        silent = set(range(plan.num_slices)).difference(plan.samples.tolist())
        tokens = [
            0 if index in silent else next_token(requests[slot], stop)
            for index, (slot, stop) in enumerate(places)
        ]
        return CompletedStep(StepResult(tokens, {index: SliceOutput() for index in silent}))

    def control(self, command: ExecutorCommand) -> FinishedCommand:
        return FinishedCommand(
            CommandResult(error="a simulated executor has no weights and no memory")
        )

    def close(self) -> None:
        pass
