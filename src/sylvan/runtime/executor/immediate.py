"""Computes steps synchronously in the caller's thread, on the CPU or a device.

Shapes: T rows of the step, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.logprobs import join
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.memory import copy_tokens
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.backend import PendingSample
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.inputs import fill_step
from sylvan.runtime.executor.local_requests import LocalRequests
from sylvan.runtime.executor.runner import ModelRunner, StageRunner
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.trees import TreePaths
from sylvan.runtime.executor.verify import accepted_drafts
from sylvan.runtime.layers.stage import WHOLE_MODEL, Stage
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.constraints import Masks, RowOutcome
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch

_PROMPT_BLOCK_BYTES = 32 << 20  # bytes of prompt-position logits held at once


class ImmediateBackend:
    """Implements `StepBackend`. Owns the step's buffers."""

    immediate = True
    runs_once = True

    def __init__(
        self,
        runner: ModelRunner,
        batch: ForwardBatch,
        sampler: TokenSampler,
        slots: RequestSlots,
        trees: TreePaths | None = None,
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        """`stage`: the pipeline stage that `runner` computes; rows are passed between stages."""
        self.batch, self._trees, self._stage = batch, trees, stage
        self.local: LocalRequests | None = None  # requests whose KV this rank holds; None: all
        self._runner, self._sampler, self._slots = runner, sampler, slots
        vocab_size = slots.params.vocab_size
        self._arrays = vars(batch.host)
        self._last_token = slots.newest
        self._fused = runner.fuse(batch, sampler, self._last_token, slots.params)
        self.logits_SV = torch.empty(0)
        block = _PROMPT_BLOCK_BYTES // (4 * vocab_size)
        self._prompt_rows = max(1, min(batch.limits.max_reqs, block))

    def update(self, plan: StepPlan) -> None:
        self.batch.input_embeds, self.batch.drafts = plan.embeds, plan.drafts
        if self._trees is not None:
            self._trees.reset()
        self.batch.rotary_positions = self.batch.row_ends = None
        self.batch.cross = ()
        if self.local is not None:
            self.local.choose(plan)
        if plan.pages.size:
            groups, slots, entries, pages = plan.pages
            self.batch.host.page_tables[groups, slots, entries] = pages
        if plan.copies:
            copy_tokens(self.batch.kv.groups, plan.copies)

    def prepare(
        self, work: Callable[[Sequence[torch.Tensor]], None], arrays: Sequence[IntArray]
    ) -> None:
        device = self.batch.positions_T.device
        with torch.inference_mode():
            work([torch.from_numpy(array).to(device) for array in arrays])

    def forward(self, plan: StepPlan, *, graph: bool) -> None:
        self._receive(plan)
        self._forward(plan)
        if not self._stage.is_last:
            assert isinstance(self._runner, StageRunner)
            self._stage.send(self._runner.stream(plan.num_tokens))

    def _receive(self, plan: StepPlan) -> None:
        """Receive rows from the previous pipeline stage, if there is one."""
        if not self._stage.is_first:
            assert isinstance(self._runner, StageRunner)
            self._runner.put_stream(self._stage.receive(plan.num_tokens))

    def _forward(self, plan: StepPlan) -> None:
        if self._fused is not None and self._is_fusible(plan):
            self._fused.run(plan, draw=False)
            self.logits_SV = self._fused.logits()
            return
        self._fill(plan)
        with torch.inference_mode():
            self.logits_SV = self._runner.run(self.batch)

    def step(self, plan: StepPlan, masks: Masks | None) -> PendingSample:
        self._receive(plan)
        if self._fused is not None and self._is_fusible(plan):
            drawn = self._fused.run(plan, draw=True, masks=masks)
            if drawn is not None:
                return drawn
            self.logits_SV = self._fused.logits()
        else:
            self._forward(plan)
        return self.draw(plan, masks)

    def draw(self, plan: StepPlan, masks: Masks | None) -> PendingSample:
        every = np.arange(plan.num_samples, dtype=np.int32)
        return self._draw(self.logits_SV, every, self._slots.rows(plan), masks)

    def draw_rows(self, rows: IntArray, batch: SamplingBatch, masks: Masks | None) -> SampleOutput:
        with torch.inference_mode():
            logits_RV = self.logits_SV[torch.from_numpy(rows).long()]
        return self._draw(logits_RV, rows, batch, masks)

    def _draw(
        self, logits_RV: torch.Tensor, rows: IntArray, batch: SamplingBatch, masks: Masks | None
    ) -> SampleOutput:
        with torch.inference_mode():
            try:
                drawn = self._sampler.sample(logits_RV, batch, masks)
            except FAILURES:
                drawn = self._draw_each(rows, batch, masks)
        self._last_token[batch.slots] = drawn.token_ids  # `accept` sets it for slices with drafts
        return drawn

    def correct(self, plan: StepPlan) -> None:
        """Do nothing: results are never late."""

    def accept(
        self, plan: StepPlan, drawn: SampleOutput, outcomes: Mapping[int, RowOutcome]
    ) -> None:
        if plan.drafts and not all(draft.is_chain for draft in plan.drafts):
            self.keep(accepted_drafts(plan, drawn.token_ids), {})
        params = self._slots.params
        if not outcomes:
            if params.counts:
                params.sampled(plan.sample_slots, drawn.token_ids)
            return
        slots = plan.sample_slots
        tokens: list[tuple[int, ...]] = [(token,) for token in drawn.token_ids.tolist()]
        for row, outcome in outcomes.items():
            tokens[row] = outcome.tokens
            # a step in flight may read the newest token; older ones are known to the host
            if outcome.tokens:
                self._last_token[slots[row]] = outcome.tokens[0]
        if params.counts:
            each = np.repeat(slots, [len(t) for t in tokens])
            ids = np.fromiter((t for some in tokens for t in some), np.int32, len(each))
            params.sampled(each, ids)

    def keep(self, paths: Mapping[int, Sequence[int]], newest: Mapping[int, int]) -> None:
        for slot, token in newest.items():
            self._last_token[slot] = token
        if self._trees is not None:
            self._trees.keep(paths)
            return
        ends = self.batch.host.q_starts[1:]
        for draft in self.batch.drafts:
            if draft.is_chain:
                continue  # already in place
            path = paths[draft.index]
            first = int(ends[draft.index]) - len(draft.parents)
            sources = [first + node for at, node in enumerate(path) if at != node]
            targets = [first + at for at, node in enumerate(path) if at != node]
            for group, slots in enumerate(self.batch.host.slot_mappings if sources else ()):
                self.batch.kv.move(group, slots[sources], slots[targets])

    def finish(self, sample: PendingSample) -> None:
        """Do nothing: all work is done."""

    def discard(self) -> None:
        """Do nothing: a failed step leaves nothing to release."""

    def logits(self, rows: IntArray) -> torch.Tensor:
        with torch.inference_mode():
            return self._runner.logits(self._computed(rows))

    def hidden(self, rows: IntArray) -> torch.Tensor:
        with torch.inference_mode():
            return self._runner.hidden(self._computed(rows))

    def layer_hidden(self, layer: int, rows: IntArray) -> torch.Tensor:
        with torch.inference_mode():
            return self._runner.layer_hidden(layer, self._computed(rows))

    def token_logprobs(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> Callable[[], TokenLogprobs]:
        """Compute in blocks to bound memory; see `StepContext.token_logprobs`."""
        parts: list[TokenLogprobs] = []
        with torch.inference_mode():
            for start in range(0, len(rows), self._prompt_rows):
                block = slice(start, start + self._prompt_rows)
                logits = self._runner.logits(self._computed(rows[block]))
                parts.append(self._sampler.token_logprobs(logits, token_ids[block], options))
        found = join(parts)
        return lambda: found

    def _computed(self, rows: IntArray) -> IntArray:
        """Map rows of the plan to rows of the computed step."""
        return rows if self._trees is None else self._trees.rows(rows)

    def _is_fusible(self, plan: StepPlan) -> bool:
        """Whether the step can run in one call: rows have ids, and slices have consecutive rows."""
        batch = self.batch
        if batch.input_embeds or batch.rotary_positions is not None or plan.positions is not None:
            return False
        if batch.row_ends is not None:
            return False
        return not plan.drafts or all(draft.is_chain for draft in plan.drafts)

    def _fill(self, plan: StepPlan) -> None:
        arrays, batch = self._arrays, self.batch
        if self._trees is not None and not all(draft.is_chain for draft in plan.drafts):
            self._trees.lay_out(plan)
            return
        host = batch.host
        fill_step(arrays, plan, host.page_tables, batch.kv.page_size, shifts=host.position_shifts)
        if batch.rotary_positions is not None:
            arrays["positions"][: plan.num_tokens] = batch.rotary_positions
        ids = arrays["input_ids"][: plan.num_tokens]
        ids[plan.in_flight] = self._last_token[plan.in_flight_slots]
        # An id outside the vocabulary fails its request at the next sample; see RequestSlots.
        np.clip(ids, 0, self._slots.table_rows - 1, out=ids)
        batch.ready(plan.num_tokens, plan.num_slices, plan.num_samples)
        if self.local is not None:
            self.local.lay_out(plan)

    def _draw_each(
        self, sampled: IntArray, rows: SamplingBatch, masks: Masks | None
    ) -> SampleOutput:
        """Sample rows one by one, to find the request whose parameters caused an error."""
        count = len(rows.slots)
        logits_SV = self._runner.logits(self.batch.host.sample_rows[sampled])
        found = SampleOutput(np.zeros(count, np.int32), {}, {})
        for row in range(count):
            one = slice(row, row + 1)
            part = SamplingBatch(rows.slots[one], rows.positions[one], rows.params)
            own = None if masks is None else masks.of(row)
            try:
                drawn = self._sampler.sample(logits_SV[one], part, own)
            except FAILURES as error:
                found.errors[row] = f"sampling failed: {error}"
                continue
            found.token_ids[row] = drawn.token_ids[0]
            if drawn.logprobs:
                found.logprobs[row] = drawn.logprobs[0]
            if drawn.errors:
                found.errors[row] = drawn.errors[0]
        return found
