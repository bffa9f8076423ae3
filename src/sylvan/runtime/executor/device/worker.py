"""One rank with a device: launches steps without waiting for what they bring.

The next step's inputs come from the last step's sampled ids on the device. Only where an output is
constrained does the host have to see an id before the next one is drawn; then the next forward
pass is under way meanwhile. Shapes: T rows, R slices, N slices that sample, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.executor.device.counts import DeviceCounts
from sylvan.runtime.executor.device.fill import fill_sampling, fill_step, fill_uniform
from sylvan.runtime.executor.device.parts import DeviceParts, Placed, Work
from sylvan.runtime.executor.device.sample import SampleLaunch
from sylvan.runtime.executor.device.step import DeviceStep
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.plan import StepPlan
from sylvan.runtime.sampling.constraints import Constraints
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots


class DeviceWorker:
    """Launches plans in order; the caller waits for them in order."""

    def __init__(self, parts: DeviceParts) -> None:
        self._parts, self._memory = parts, parts.memory
        self._stream = parts.platform.stream()
        self._params = SamplingSlots(parts.limits.max_reqs, parts.memory.vocab_size)
        self._counts = DeviceCounts(parts.platform, parts.memory.vocab_size)
        self._bad: dict[int, str] = {}  # slot -> why its request cannot be sampled
        self._bound: set[int] = set()  # slots whose outputs are constrained
        self._unfollowed: deque[DeviceStep] = deque()  # constraints have not seen their ids yet
        self._unsettled: StepPlan | None = None  # constraints have not seen who left and joined
        self._logits_RV = torch.empty(0)

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Start a step; a failure is told by its `wait`, and nothing of the step counts."""
        step = DeviceStep(plan, torch.empty(0))
        try:
            self._launch(plan, step)
        except FAILURES as error:
            self._parts.platform.trim()
            step.error = failure(error)
            self._settle_constraints()
        return step

    def _launch(self, plan: StepPlan, step: DeviceStep) -> None:
        self._unsettled = plan
        work = self._apply(plan)
        if not plan.num_slices:
            self._settle_constraints()
            self._run(work)
            step.event = self._stream.event()
            return
        placed = self._place(plan)
        rows = SamplingBatch(plan.slots[plan.samples], _positions(plan), self._params)
        self._fill_rows(placed, rows)
        step.ids = self._parts.platform.pinned(len(plan.samples), torch.int32)
        self._run([*work, lambda: placed.inputs.upload(placed.host)])
        placed.host.used = self._stream.event()
        self._run([lambda: self._forward(placed)])
        if changed := self._settle_constraints():
            self._correct(plan, placed, changed)
        SampleLaunch(self._parts, self._counts, placed, step).prepare(
            rows, self._bad, bound=bool(self._bound & set(rows.slots.tolist()))
        ).run(self._stream, lambda: self._logits_RV)
        if step.follow is not None:
            self._unfollowed.append(step)
        step.event = self._stream.event()

    def _run(self, works: Sequence[Work]) -> None:
        def together() -> None:
            with torch.inference_mode():
                for work in works:
                    work()

        if works:
            self._stream.run(together)

    # ---- what changed since the last step

    def _apply(self, plan: StepPlan) -> list[Work]:
        """Parameters and pages of requests that came, went or grew; the device's part of it."""
        works: list[Work] = []
        for slot in plan.leaves:
            self._params.leave(slot)
            self._counts.drop(slot)
            self._bad.pop(slot, None)
        for entry in plan.joins:
            slot = entry.slot
            self._bad.pop(slot, None)
            self._counts.drop(slot)
            if not _within(entry.request, self._params.vocab_size):
                self._bad[slot] = f"token ids must be in 0..{self._params.vocab_size - 1}"
                self._params.leave(slot)
                continue
            try:
                self._params.join(slot, entry.request, entry.outputs)
            except FAILURES as error:
                self._params.leave(slot)
                self._bad[slot] = f"sampling parameters cannot be used: {error}"
                continue
            if self._params.has_penalty[slot]:
                works.append(self._counts.open(slot, entry.outputs))
        if upload := self._memory.table.write(plan.pages):
            works.append(upload)
        if plan.copies:
            works.append(lambda: self._copy(plan))
        return works

    def _copy(self, plan: StepPlan) -> None:
        for source, target, num_tokens in plan.copies:
            self._memory.batch.kv.copy(source, target, num_tokens)

    def _settle_constraints(self) -> dict[int, int]:
        """Let constraints see all ids sampled so far, then who leaves and joins.

        Returns newest tokens, by slot, that are others than those sampled.
        """
        plan, self._unsettled = self._unsettled, None
        changed: dict[int, int] = {}
        recounts: list[tuple[int, int, float]] = []
        while self._unfollowed:
            step = self._unfollowed.popleft()
            step.complete()
            changed |= step.changed
            recounts += step.recounts
        if plan is None:
            return changed
        gone = {*plan.leaves, *(entry.slot for entry in plan.joins)}
        if correct := self._counts.correct([r for r in recounts if r[0] not in gone]):
            self._run([correct])
        if self._parts.constraints is not None:
            self._tell(self._parts.constraints, plan)
        return {slot: token for slot, token in changed.items() if slot not in gone}

    def _tell(self, constraints: Constraints, plan: StepPlan) -> None:
        for slot in plan.leaves:
            constraints.leave(slot)
            self._bound.discard(slot)
        for entry in plan.joins:
            self._bound.discard(entry.slot)
            try:
                constraints.join(entry.slot, entry.request, entry.outputs)
            except FAILURES as error:
                self._bad[entry.slot] = f"sampling parameters cannot be used: {error}"
                continue
            if constraints.bound(entry.slot):
                self._bound.add(entry.slot)

    def _correct(self, plan: StepPlan, placed: Placed, changed: dict[int, int]) -> None:
        """A constraint chose another token than the one drawn: compute what read it again."""
        slots = self._parts.platform.pinned(len(changed), torch.int64)
        tokens = self._parts.platform.pinned(len(changed), torch.int32)
        slots.numpy()[:], tokens.numpy()[:] = list(changed), list(changed.values())
        last = self._memory.last_S

        def write() -> None:
            index, value = (x.to(last.device, non_blocking=True) for x in (slots, tokens))
            last.index_copy_(0, index, value)

        reads = bool(set(changed) & set(plan.in_flight_slots.tolist()))
        self._run([write, lambda: self._forward(placed)] if reads else [write])

    # ---- the forward pass

    def _place(self, plan: StepPlan) -> Placed:
        """Write the step's inputs into host memory of their own."""
        tokens = int((plan.stops - plan.starts).sum())
        runner = self._parts.runner
        bucket = None if plan.prompt else runner.bucket(tokens, plan.num_slices)
        inputs = self._memory.inputs(tokens, plan.num_slices)
        host, batch = inputs.host(), self._memory.batch
        table, page_size = batch.host.page_table, batch.kv.page_size
        return Placed(inputs, host, fill_step(host.arrays, plan, table, page_size, bucket))

    def _fill_rows(self, placed: Placed, rows: SamplingBatch) -> None:
        arrays, slots = placed.host.arrays, rows.slots
        fill_sampling(arrays, slots, rows.positions, self._params)
        arrays["count_rows"][: len(slots)] = self._counts.rows(slots)
        if not self._parts.sampling.makes_numbers and not self._params.greedy[slots].all():
            fill_uniform(arrays, slots, rows.positions, self._params)

    def _forward(self, placed: Placed) -> None:
        """Inside `Stream.run`."""
        with torch.inference_mode():
            memory = self._memory
            memory.point(placed.inputs, placed.sizes, placed.host)
            graph = placed.sizes.bucket is not None
            logits = self._parts.runner.run(memory.batch, graph=graph)
            self._logits_RV = logits[: placed.sizes.samples]


def _positions(plan: StepPlan) -> np.ndarray:
    return plan.stops[plan.samples].astype(np.int64)


def _within(request: GenerateRequest, vocab_size: int) -> bool:
    """Whether a kernel may look up the ids; the edge has refused others already."""
    parts = (request.input_ids, request.output_ids)
    return all(not len(p) or (p.min() >= 0 and p.max() < vocab_size) for p in parts)
