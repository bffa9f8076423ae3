"""The worker of one rank: applies plans, runs them on a backend, converts samples to results.

An immediate backend has finished when `launch` returns. A device only queues the step; its ids are
read when needed: by `LaunchedStep.wait`, or before the next step samples constrained requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.step import Join, SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.backend import PendingSample, StepBackend
from sylvan.runtime.executor.capability import (
    CapabilityWorker,
    Report,
    StepContext,
    overriding,
)
from sylvan.runtime.executor.control import StepGate
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.results import failing, step_result
from sylvan.runtime.executor.rounds import verify_in_rounds
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.verify import without_drafts
from sylvan.runtime.pool.prefault import PagePrefaulter
from sylvan.runtime.sampling.constraints import Constraints, Masks, RowOutcome
from sylvan.runtime.sampling.params import SamplingBatch

NO_OUTCOMES: Mapping[int, RowOutcome] = {}
NO_ERRORS: Mapping[int, str] = {}


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """Implements `Pending`. A later step may complete it before `wait` is called.

    Attributes:
        sample: Sampled tokens; None if the step had no slices or failed.
        rows: Sampled rows, if some of them are constrained.
        errors: Slice index -> the error of its request.
        context: Set if the step has work of capabilities.
        reports: Reports by capability.
        outputs: Outputs by slice, if draft tokens were verified in rounds.
    """

    worker: StepWorker
    plan: StepPlan
    sample: PendingSample | None = None
    rows: SamplingBatch | None = None
    errors: Mapping[int, str] | None = None
    context: StepContext | None = None
    reports: Mapping[str, Report] | None = None
    outputs: Sequence[SliceOutput] | None = None
    error: ExecutorError | None = None
    result: StepResult | None = None

    def done(self) -> bool:
        return self.result is not None or self.sample is None or self.sample.done()

    def wait(self) -> StepResult:
        if self.result is None:
            self.complete()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def complete(self) -> None:
        """Convert the samples to a result, once."""
        if self.result is not None or self.error is not None:
            return
        if self.sample is None:
            reports = (self.reports or {}).items()
            self.result = StepResult(reports={name: report() for name, report in reports})
            return
        try:
            self.result = self.worker.complete(self, self.sample)
        except FAILURES as error:
            self.error = failure(error)


class StepWorker:
    """Owns the request slots and the worker halves of capabilities."""

    def __init__(
        self,
        backend: StepBackend,
        slots: RequestSlots,
        capabilities: Sequence[CapabilityWorker] = (),
        gate: StepGate | None = None,
        prefaulter: PagePrefaulter | None = None,
    ) -> None:
        """`gate` is closed while no step may run; `prefaulter` is notified when steps run."""
        self._prefaulter = prefaulter
        self._backend, self._slots, self._gate = backend, slots, gate or StepGate()
        self._capabilities = tuple(capabilities)
        self._by_name = {c.name: c for c in capabilities}
        self._joiners = overriding(self._capabilities, "join")
        self._leavers = overriding(self._capabilities, "leave")
        self._constraints: Constraints | None = next(
            (c for worker in capabilities if (c := worker.constraints) is not None), None
        )
        self._filler = next((f for worker in capabilities if (f := worker.filler)), None)
        self._constrained: set[int] = set()  # slots with constrained outputs
        self._unseen: deque[LaunchedStep] = deque()  # steps whose ids constraints have not seen yet
        self._unapplied: StepPlan | None = None  # plan whose joins and leaves are not applied yet

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. If it fails as a whole, `LaunchedStep.wait` raises the error."""
        if plan.drafts and not self._backend.immediate:
            plan = self._drawable(plan)
        step = LaunchedStep(self, plan)
        self._unapplied = plan
        if self._prefaulter is not None:
            self._prefaulter.begin(plan.pages)
        try:
            self._launch(plan, step)
        except FAILURES as error:
            self._backend.discard()
            step.sample, step.error = None, failure(error)
            self._follow(plan)
        if self._prefaulter is not None:
            self._prefaulter.end()
        return step

    def complete(self, step: LaunchedStep, sample: PendingSample) -> StepResult:
        """Wait for a launched step and return its result."""
        plan, drawn = step.plan, sample.wait()
        if step.outputs is not None:
            result = failing(step.outputs, step.errors or NO_ERRORS)
            if step.context is not None:
                self._report(step, step.context, result)
            return result
        outcomes = NO_OUTCOMES
        if step.rows is not None and self._constraints is not None:
            outcomes = self._constraints.advance(step.rows, drawn.token_ids)
        self._backend.accept(plan, drawn, outcomes)
        result = step_result(plan, drawn, outcomes, step.errors or NO_ERRORS)
        if step.context is not None:
            self._report(step, step.context, result)
        return result

    def close(self) -> None:
        """Close the worker halves of capabilities."""
        for capability in self._capabilities:
            capability.close()
        if self._prefaulter is not None:
            self._prefaulter.close()

    def _launch(self, plan: StepPlan, step: LaunchedStep) -> None:
        backend = self._backend
        if plan.work:
            self._prepare(plan)
        if plan.leaves or plan.joins:
            self._apply(plan)
        backend.update(plan)
        if not plan.num_slices:
            self._follow(plan)
            step.reports = self._idle_step(plan)
            return
        if self._gate.closed:
            raise RuntimeError(self._gate.closed)
        if plan.work:
            step.context = self._before_forward(plan)
        if backend.immediate:
            step.sample = self._filled(plan, step) or self._compute(plan, step)
        else:
            if backend.runs_once:
                self._follow(plan)
            backend.forward(plan, graph=step.context is None or step.context.may_use_graph)
            self._follow(plan)
            step.sample = backend.draw(plan, self._masks(plan, step))
        self._finish(plan, step, step.sample)

    def _finish(self, plan: StepPlan, step: LaunchedStep, sample: PendingSample) -> None:
        """Finish a step after sampling."""
        if step.context is not None:
            self._after_forward(step, step.context)
        if self._slots.errors:
            self._note_errors(plan, step)
        if not self._backend.immediate:
            self._backend.finish(sample)
            return
        step.complete()
        if step.error is not None:
            self._follow(plan)

    def _compute(self, plan: StepPlan, step: LaunchedStep) -> PendingSample:
        """Run forward pass and sampling; slow masks are built during the forward pass."""
        backend, constraints = self._backend, self._constraints
        self._follow(plan)
        is_constrained = constraints is not None and self._is_constrained(plan)
        if plan.drafts and (is_constrained or self._is_penalised(plan)):
            backend.forward(plan, graph=False)
            verified = verify_in_rounds(plan, backend, self._slots, constraints)
            step.outputs = verified.outputs
            return verified.drawn
        if constraints is None or not is_constrained:
            return backend.step(plan, None)
        rows = step.rows = self._slots.rows(plan)
        if not constraints.prepare(rows.slots, rows.positions):
            return backend.step(plan, None)
        if constraints.ready:
            return backend.step(plan, constraints.masks(rows))
        backend.forward(plan, graph=False)
        return backend.draw(plan, constraints.masks(rows))

    def _filled(self, plan: StepPlan, step: LaunchedStep) -> PendingSample | None:
        """Let the capability with a `filler` compute the step, in as many passes as it needs."""
        if self._filler is None:
            return None
        self._follow(plan)
        filled = self._filler.fill(plan, self._backend, self._slots)
        step.outputs = filled.outputs
        return filled.drawn

    def _masks(self, plan: StepPlan, step: LaunchedStep) -> Masks | None:
        constraints = self._constraints
        if constraints is None or not self._is_constrained(plan):
            return None
        rows = step.rows = self._slots.rows(plan)
        constraints.prepare(rows.slots, rows.positions)
        self._unseen.append(step)
        return constraints.masks(rows)

    def _is_constrained(self, plan: StepPlan) -> bool:
        constrained = self._constrained
        return bool(constrained) and not constrained.isdisjoint(plan.sample_slots.tolist())

    def _is_penalised(self, plan: StepPlan) -> bool:
        """Whether penalties apply to a slice with draft tokens."""
        params = self._slots.params
        if not params.counts:
            return False
        slots = [int(plan.slots[draft.index]) for draft in plan.drafts]
        return bool(params.has_penalty[slots].any())

    def _drawable(self, plan: StepPlan) -> StepPlan:
        """Drop drafts that a device cannot verify, so that all rows can be sampled at once."""
        slots = {draft.index: int(plan.slots[draft.index]) for draft in plan.drafts}
        penalised = self._slots.params.has_penalty
        rounds = [i for i, slot in slots.items() if slot in self._constrained or penalised[slot]]
        return without_drafts(plan, rounds) if rounds else plan

    def _note_errors(self, plan: StepPlan, step: LaunchedStep) -> None:
        errors, slots = dict(step.errors or {}), plan.slots
        for index in set(plan.samples.tolist()):
            if why := self._slots.errors.get(int(slots[index])):
                errors[index] = why
        step.errors = errors

    # ---- requests join and leave

    def _apply(self, plan: StepPlan) -> None:
        self._slots.apply(plan)
        for slot in plan.leaves:
            for capability in self._leavers:
                capability.leave(slot)
        for join in plan.joins:
            for capability in self._joiners:
                try:
                    capability.join(join)
                except FAILURES as error:
                    self._slots.fail(join.slot, error)

    def _follow(self, plan: StepPlan) -> None:
        """Let constraints see all ids sampled so far, then apply leaves and joins."""
        if self._unapplied is not plan:
            return
        self._unapplied = None
        while self._unseen:
            self._unseen.popleft().complete()
        self._backend.correct(plan)
        if self._constraints is None:
            return
        for slot in plan.leaves:
            self._constraints.leave(slot)
            self._constrained.discard(slot)
        for join in plan.joins:
            self._constrained.discard(join.slot)
            self._constrain(self._constraints, join)

    def _constrain(self, constraints: Constraints, join: Join) -> None:
        if not isinstance(join.request, GenerateRequest):
            return
        try:
            constraints.join(join.slot, join.request, join.outputs)
        except FAILURES as error:
            self._slots.fail(join.slot, error)
            return
        if constraints.constrains(join.slot):
            self._constrained.add(join.slot)

    # ---- capabilities

    def _prepare(self, plan: StepPlan) -> None:
        unknown = plan.work.keys() - self._by_name.keys()
        if unknown:
            raise ValueError(f"the plan has work for unknown capabilities: {sorted(unknown)}")
        for name, work in plan.work.items():
            self._by_name[name].prepare(work)

    def _idle_step(self, plan: StepPlan) -> dict[str, Report]:
        made = ((name, self._by_name[name].idle_step(work)) for name, work in plan.work.items())
        return {name: report for name, report in made if report is not None}

    def _before_forward(self, plan: StepPlan) -> StepContext:
        reads_rows = any(self._by_name[name].reads_rows for name in plan.work)
        context = StepContext(plan, self._backend, may_use_graph=not reads_rows)
        for name, work in plan.work.items():
            self._by_name[name].before_forward(context, work)
        return context

    def _after_forward(self, step: LaunchedStep, context: StepContext) -> None:
        reports: dict[str, Report] = {}
        for name, work in context.plan.work.items():
            report = self._by_name[name].after_forward(context, work)
            if report is not None:
                reports[name] = report
        step.reports, step.errors = reports, context.errors

    def _report(self, step: LaunchedStep, context: StepContext, result: StepResult) -> None:
        for name, work in context.plan.work.items():
            self._by_name[name].after_result(context, work, result)
        for name, report in (step.reports or {}).items():
            result.reports[name] = report()
