"""Workers of pipeline stages before the last: compute their layers, and pass the rows on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.step import Join, StepPlan, StepResult
from sylvan.runtime.executor.capability import CapabilityWorker, StepContext, overriding
from sylvan.runtime.executor.control import StepGate
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.pool.prefault import PagePrefaulter

logger = logging.getLogger(__name__)


class StageStep:
    """Implements `Pending`: a step that this stage has computed, or that failed here."""

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
    """The worker of a stage before the last: samples nothing; capabilities act in layers only.

    Args:
        backend: Computes the layers of this stage.
        capabilities: All worker halves; those with `in_layers` take part.
        gate: Closed while no step may run.
        prefaulter: Notified when steps run.
    """

    def __init__(
        self,
        backend: ImmediateBackend,
        capabilities: Sequence[CapabilityWorker],
        gate: StepGate,
        prefaulter: PagePrefaulter,
    ) -> None:
        self._backend, self._gate, self._prefaulter = backend, gate, prefaulter
        self._capabilities = tuple(capabilities)
        self._in_layers = {worker.name: worker for worker in capabilities if worker.in_layers}
        self._joiners = overriding(tuple(self._in_layers.values()), "join")

    def launch(self, plan: StepPlan) -> StageStep:
        """Compute this stage's part of a step.

        Raises:
            RankLostError: another stage has ended, or is late.
        """
        self._prefaulter.begin(plan.pages)
        error = None
        try:
            self._compute(plan)
        except FAILURES as failed:
            error = failure(failed)
        self._prefaulter.end()
        return StageStep(error)

    def close(self) -> None:
        """End the threads."""
        for capability in self._capabilities:
            capability.close()
        self._prefaulter.close()

    def _compute(self, plan: StepPlan) -> None:
        work = [(w, plan.work[name]) for name, w in self._in_layers.items() if name in plan.work]
        for worker, own in work:
            worker.prepare(own)
        for join in plan.joins:
            for worker in self._joiners:
                self._join(worker, join)
        self._backend.update(plan)
        if not plan.num_slices:
            return
        if self._gate.closed:
            raise RuntimeError(self._gate.closed)
        for worker, own in work:
            worker.before_forward(StepContext(plan, self._backend, may_use_graph=False), own)
        self._backend.forward(plan, graph=False)

    def _join(self, worker: CapabilityWorker, join: Join) -> None:
        """Let a request join; on failure the last stage fails the request, so only log it here."""
        try:
            worker.join(join)
        except FAILURES as error:
            logger.debug("a request failed as it entered slot %d: %s", join.slot, error)
