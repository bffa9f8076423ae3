"""Pipeline stages before the last: they compute their layers of a step, and hand on its rows."""

from __future__ import annotations

from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.executor.control import StepGate
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.pool.ahead import PagesAhead


class StageStep:
    """Implements `Pending`: the step has left this stage, or failed there."""

    def __init__(self, error: ExecutorError | None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        """See `Pending.wait`; the result is empty, because the last stage samples."""
        if self._error is not None:
            raise self._error
        return StepResult()


class StageWorker:
    """In place of a `StepWorker`: no slots of sampling parameters, no capabilities."""

    def __init__(self, backend: ImmediateBackend, gate: StepGate, ahead: PagesAhead) -> None:
        self._backend, self._gate, self._ahead = backend, gate, ahead

    def launch(self, plan: StepPlan) -> StageStep:
        """Compute this stage's part of a step.

        Raises:
            RankLostError: another stage has ended, or is late.
        """
        self._ahead.begin(plan.pages)
        error = None
        try:
            if self._gate.closed:
                raise RuntimeError(self._gate.closed)
            self._backend.update(plan)
            if plan.num_slices:
                self._backend.forward(plan, graph=False)
        except FAILURES as failed:
            error = failure(failed)
        self._ahead.end()
        return StageStep(error)

    def close(self) -> None:
        """End helpers."""
        self._ahead.close()
