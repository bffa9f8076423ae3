"""An executor that computes nothing: the real scheduler over a cost model and virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sylvan.runtime.core.req import Batch, Req, SliceOutput, StepResult
from sylvan.runtime.executor.api import ExecutorCaps


@dataclass(frozen=True, slots=True)
class Done:
    """A step whose result is known."""

    result: StepResult

    def done(self) -> bool:
        """See `Pending.done`."""
        return True

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        return self.result


class SimExecutor:
    """Emits scripted tokens and advances a virtual clock by the modelled step time."""

    def __init__(
        self,
        next_token: Callable[[Req, int], int],
        step_time_s: Callable[[Batch], float],
        caps: ExecutorCaps | None = None,
    ) -> None:
        """`next_token(req, position)` gives the id of the token at `position`."""
        self.caps = caps or ExecutorCaps(max_batch_tokens=8192, max_running_reqs=256)
        self.now_s = 0.0
        self.steps = 0
        self.computed_tokens = 0
        self._next_token = next_token
        self._step_time_s = step_time_s

    def launch(self, batch: Batch) -> Done:
        """Account for the step and return its tokens."""
        self.now_s += self._step_time_s(batch)
        self.steps += 1
        self.computed_tokens += batch.num_tokens
        tokens = [self._next_token(s.req, s.stop) if s.samples else 0 for s in batch.slices]
        others = {i: SliceOutput() for i, s in enumerate(batch.slices) if not s.samples}
        return Done(StepResult(tokens=tokens, others=others))

    def close(self) -> None:
        """See `Executor.close`."""
