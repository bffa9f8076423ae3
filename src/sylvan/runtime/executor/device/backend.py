"""Queues steps on a device without waiting for their results.

The next step reads the last step's sampled ids on the device. Only constrained outputs need the
host to see an id before the next one is sampled; the worker launches the next forward pass before
it waits for the id. Shapes: T rows, R slices, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.memory import copy_tokens
from sylvan.runtime.core.states import StateWork
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.backend import PendingSample
from sylvan.runtime.executor.device.counts import DeviceCounts
from sylvan.runtime.executor.device.edits import StagedEdits, pinned_copy
from sylvan.runtime.executor.device.logprobs import LogprobReader, LogprobRequest, index_on
from sylvan.runtime.executor.device.parts import DeviceParts, StagedStep, Work
from sylvan.runtime.executor.device.pending_sample import DevicePendingSample, SampleLaunch
from sylvan.runtime.executor.device.sampling_inputs import fill_sampling, fill_uniform
from sylvan.runtime.executor.inputs import fill_step
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.pool.states import QueuedStates
from sylvan.runtime.sampling.constraints import Masks, RowOutcome
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch

_PROMPT_BLOCK_BYTES = 256 << 20  # logits of prompt positions held at once


def state_work(plan: StepPlan) -> StateWork | None:
    """Return a plan's work on recurrent states; `batch.state_work` may be a later plan's."""
    return next((work for work in plan.work.values() if isinstance(work, StateWork)), None)


class DeviceBackend:
    """Implements `StepBackend`; the caller waits for its pending samples in order."""

    immediate = False

    def __init__(self, parts: DeviceParts, slots: RequestSlots) -> None:
        self.batch = parts.memory.batch
        self.runs_once = self.batch.states is not None
        self._parts, self._memory, self._slots = parts, parts.memory, slots
        self._stream = parts.platform.stream()
        self._counts = DeviceCounts(parts.platform, parts.memory.vocab_size)
        self._staged: StagedStep | None = None
        self._newest: dict[int, int] = {}  # slot -> its sampled id as changed by constraints
        self._recounts: list[tuple[int, int, float]] = []  # (slot, id, change of the count)
        self._logits_SV = torch.empty(0)

    def update(self, plan: StepPlan) -> None:
        self._staged = None
        self.batch.input_embeds, self.batch.drafts = plan.embeds, plan.drafts
        self.batch.rotary_positions = self.batch.row_ends = None
        self.batch.cross = ()
        works: list[Work] = []
        for slot in plan.leaves:
            self._counts.drop(slot)
        for join in plan.joins:
            self._counts.drop(join.slot)
            wanted = self._slots.params.has_penalty[join.slot]
            if wanted and join.slot not in self._slots.errors:
                works.append(self._counts.open(join.slot, join.outputs))
        if upload := self._memory.table.write(plan.pages):
            works.append(upload)
        if plan.copies:
            works.append(lambda: self._copy(plan))
        self._run(works)

    def forward(self, plan: StepPlan, *, graph: bool) -> None:
        staged = self._staged = self._stage(plan, graph=graph)
        self._fill_rows(plan, staged)
        states = self.batch.states
        copies = [states.take_copies()] if isinstance(states, QueuedStates) else []
        self._run([*copies, lambda: staged.inputs.upload(staged.host), staged.edits.upload])
        staged.host.used = self._stream.event()
        work = state_work(plan)

        def forward() -> None:
            self.batch.state_work = work
            self._forward(staged)

        self._run([forward])

    def step(self, plan: StepPlan, masks: Masks | None) -> DevicePendingSample:
        self.forward(plan, graph=True)
        return self.draw(plan, masks)

    def draw_rows(self, rows: IntArray, batch: SamplingBatch, masks: Masks | None) -> SampleOutput:
        """Not supported: only immediate backends sample in rounds."""
        raise NotImplementedError("steps of a device draw all rows at once")

    def keep(self, paths: Mapping[int, Sequence[int]], newest: Mapping[int, int]) -> None:
        """Not supported: devices verify chains only, whose KV is already in place."""
        raise NotImplementedError("steps of a device verify no trees")

    def correct(self, plan: StepPlan) -> None:
        gone = {*plan.leaves, *(join.slot for join in plan.joins)}
        recounts, self._recounts = [r for r in self._recounts if r[0] not in gone], []
        newest = {slot: token for slot, token in self._newest.items() if slot not in gone}
        self._newest = {}
        if correct := self._counts.correct(recounts):
            self._run([correct])
        if newest:
            self._write_newest(plan, newest)

    def draw(self, plan: StepPlan, masks: Masks | None) -> DevicePendingSample:
        assert self._staged is not None
        launch = SampleLaunch(self._parts, self._counts, self._staged, self._slots.rows(plan))
        launch.prepare(masks)
        return launch.run(self._stream, lambda: self._logits_SV)

    def accept(
        self, plan: StepPlan, drawn: SampleOutput, outcomes: Mapping[int, RowOutcome]
    ) -> None:
        """Store corrections; the device gets them with the next step."""
        slots = plan.sample_slots
        for row, outcome in outcomes.items():
            slot, token = int(slots[row]), int(drawn.token_ids[row])
            if outcome.error:
                continue
            self._recounts.append((slot, token, -1.0))  # the device counted it already
            self._recounts += [(slot, t, 1.0) for t in outcome.tokens]
            if outcome.tokens and outcome.tokens[0] != token:
                self._newest[slot] = outcome.tokens[0]

    def prepare(
        self, work: Callable[[Sequence[torch.Tensor]], None], arrays: Sequence[IntArray]
    ) -> None:
        hosts = [pinned_copy(self._parts.platform, array) for array in arrays]
        device = self._parts.platform.device
        self._run([lambda: work([host.to(device, non_blocking=True) for host in hosts])])

    def finish(self, sample: PendingSample) -> None:
        assert isinstance(sample, DevicePendingSample)
        sample.event = self._stream.event()

    def discard(self) -> None:
        self._staged = None
        self._parts.platform.trim()

    # ---- for worker halves of capabilities

    def logits(self, rows: IntArray) -> torch.Tensor:
        """Wait for the device, then return the logits."""
        return self._read(self._parts.runner.logits, rows)

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """Wait for the device, then return the vectors."""
        return self._read(self._parts.runner.hidden, rows)

    def layer_hidden(self, layer: int, rows: IntArray) -> torch.Tensor:
        """Wait for the device, then return the vectors."""
        return self._read(lambda index: self._parts.runner.layer_hidden(layer, index), rows)

    def token_logprobs(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> Callable[[], TokenLogprobs]:
        """Compute in blocks to bound memory; see `StepContext.token_logprobs`."""
        platform, vocab_size = self._parts.platform, self._memory.vocab_size
        reader = LogprobReader(platform, LogprobRequest(len(rows), options), vocab_size)
        size = max(1, _PROMPT_BLOCK_BYTES // (4 * vocab_size))
        works: list[Work] = []
        for start in range(0, len(rows), size):
            index = index_on(platform, rows[start : start + size])
            ids = index_on(platform, token_ids[start : start + size])

            def work(index: torch.Tensor = index, ids: torch.Tensor = ids, at: int = start) -> None:
                on = (x.to(platform.device, non_blocking=True) for x in (index, ids))
                where, wanted = on
                reader.launch(self._parts.runner.logits(where).float(), wanted, at)

            works.append(work)
        self._run(works)
        return lambda: reader.read(token_ids)

    # ---- inside

    def _run(self, works: Sequence[Work]) -> None:
        def together() -> None:
            with torch.inference_mode():
                for work in works:
                    work()

        if works:
            self._stream.run(together)

    def _read(
        self, compute: Callable[[torch.Tensor], torch.Tensor], rows: IntArray
    ) -> torch.Tensor:
        index = index_on(self._parts.platform, rows)
        found: list[torch.Tensor] = []
        device = self._parts.platform.device
        self._run([lambda: found.append(compute(index.to(device, non_blocking=True)))])
        self._stream.event().wait()
        return found[0]

    def _copy(self, plan: StepPlan) -> None:
        copy_tokens(self.batch.kv.groups, plan.copies)

    def _write_newest(self, plan: StepPlan, newest: Mapping[int, int]) -> None:
        """Replace ids that constraints changed, and recompute the rows that read the old ones."""
        slots = self._parts.platform.pinned(len(newest), torch.int64)
        tokens = self._parts.platform.pinned(len(newest), torch.int32)
        slots.numpy()[:], tokens.numpy()[:] = list(newest), list(newest.values())
        last = self._memory.last_S

        def write() -> None:
            index, value = (x.to(last.device, non_blocking=True) for x in (slots, tokens))
            last.index_copy_(0, index, value)

        works: list[Work] = [write]
        staged = self._staged
        if staged is not None and not newest.keys().isdisjoint(plan.in_flight_slots.tolist()):
            works.append(lambda: self._forward(staged))
        self._run(works)

    def _stage(self, plan: StepPlan, *, graph: bool) -> StagedStep:
        """Write the step's inputs into a host buffer of its own."""
        runner, tokens = self._parts.runner, plan.num_tokens
        edits = StagedEdits(self._parts.platform, self.batch)
        graph = graph and edits.is_plain and not plan.drafts
        bucket = runner.bucket(tokens, plan.num_slices) if graph else None
        inputs = self._memory.inputs(tokens, plan.num_slices)
        host, batch = inputs.host(), self.batch
        in_flight = host.arrays["in_flight_slots"]
        in_flight[: bucket.rows if bucket else tokens] = -1
        in_flight[plan.in_flight] = plan.in_flight_slots
        tables, shifts = batch.host.page_tables, batch.host.position_shifts
        sizes = fill_step(host.arrays, plan, tables, batch.kv.page_size, bucket, shifts)
        if batch.rotary_positions is not None:
            host.arrays["positions"][:tokens] = batch.rotary_positions
        if (work := state_work(plan)) is not None:
            host.arrays["state_slots"][:] = -1
            host.arrays["state_slots"][: plan.num_slices] = work.slots
        return StagedStep(inputs, host, sizes, edits)

    def _fill_rows(self, plan: StepPlan, staged: StagedStep) -> None:
        arrays, rows, params = staged.host.arrays, self._slots.rows(plan), self._slots.params
        slots = rows.slots
        fill_sampling(arrays, slots, rows.positions, params)
        arrays["count_rows"][: len(slots)] = self._counts.rows(slots)
        if not self._parts.sampling.generates_random and not params.greedy[slots].all():
            fill_uniform(arrays, slots, rows.positions, params)

    def _forward(self, staged: StagedStep) -> None:
        """Launch the forward pass; call inside `Stream.run`."""
        memory = self._memory
        memory.set_views(staged.inputs, staged.sizes, staged.host, staged.edits.on_device)
        graph = staged.sizes.bucket is not None
        with torch.inference_mode():
            logits = self._parts.runner.run(memory.batch, graph=graph)
        self._logits_SV = logits[: staged.sizes.samples]
