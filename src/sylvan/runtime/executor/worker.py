"""One rank: fills the forward batch from a plan, runs the model, samples.

Shapes: T rows of the step, R slices, S request slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.arrays import FloatArray, IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.req import SliceOutput, StepResult
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.plan import Join, StepPlan
from sylvan.runtime.executor.pooling import Pooler
from sylvan.runtime.executor.runner import GraphRunner
from sylvan.runtime.sampling.constraints import Constraints
from sylvan.runtime.sampling.logprobs import join, token_logprobs
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.sampler import Sampler

_PROMPT_BLOCK_BYTES = 32 << 20  # logits of prompt positions held at once


@dataclass(slots=True)
class _Found:
    """What a step brought so far, by slice index."""

    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)
    vectors: dict[int, FloatArray] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # of `errors`: what was asked for is to blame


class Worker:
    """Owns the step's buffers, the sampling parameters and the newest token of each slot."""

    def __init__(
        self,
        runner: GraphRunner,
        batch: ForwardBatch,
        sampler: Sampler,
        vocab_size: int,
        pooler: Pooler | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        num_slots = batch.limits.max_reqs
        self._runner = runner
        self._batch = batch
        self._sampler = sampler
        self._params = SamplingSlots(num_slots, vocab_size)
        self._pooler = pooler
        self._constraints = constraints
        self._last_token: IntArray = np.zeros(num_slots, np.int32)
        self._bad: dict[int, str] = {}  # slot -> why its request cannot be sampled
        self._prompt_rows = max(1, min(num_slots, _PROMPT_BLOCK_BYTES // (4 * vocab_size)))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            ExecutorError: the forward pass failed; nothing of the step counts.
        """
        self._apply(plan)
        if not plan.num_slices:
            return StepResult(())
        found = _Found()
        with torch.inference_mode():
            if self._constraints is not None:
                self._constraints.prepare(plan.slots[plan.samples], _positions(plan))
            try:
                self._copy_pages(plan)
                self._fill(plan)
                logits_RV = self._runner.run(self._batch)
            except FAILURES as error:
                raise failure(error) from error
            self._sample(plan, logits_RV, found)
            self._prompt_logprobs(plan, found)
            self._pool(plan, found)
        return StepResult([_output(found, index) for index in range(plan.num_slices)])

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self._params.leave(slot)
            self._bad.pop(slot, None)
            if self._constraints is not None:
                self._constraints.leave(slot)
            if self._pooler is not None:
                self._pooler.forget(slot)
        for entry in plan.joins:
            self._join(entry)
        table = self._batch.host.page_table
        for update in plan.pages:
            table[update.slot, update.start : update.start + len(update.pages)] = update.pages

    def _join(self, entry: Join) -> None:
        self._bad.pop(entry.slot, None)
        if not _within(entry.request, self._params.vocab_size):
            self._bad[entry.slot] = f"token ids must be in 0..{self._params.vocab_size - 1}"
        try:
            self._params.join(entry.slot, entry.request, entry.outputs)
            if self._constraints is not None:
                self._constraints.join(entry.slot, entry.request, entry.outputs)
        except FAILURES as error:
            self._params.leave(entry.slot)
            self._bad[entry.slot] = f"sampling parameters cannot be used: {error}"

    def _copy_pages(self, plan: StepPlan) -> None:
        for source, target, num_tokens in plan.copies:
            self._batch.kv.copy(source, target, num_tokens)
        self._batch.state_work = plan.states
        if plan.states is not None and self._batch.states is not None:
            for source, target in plan.states.copies:
                self._batch.states.copy(source, target)

    def _fill(self, plan: StepPlan) -> None:
        host, page_size = self._batch.host, self._batch.kv.page_size
        lens = plan.stops - plan.starts
        num_tokens, num_reqs = int(lens.sum()), plan.num_slices
        ends = np.cumsum(lens, dtype=np.int32)
        host.q_starts[0] = 0
        host.q_starts[1 : num_reqs + 1] = ends
        host.kv_lens[:num_reqs] = plan.stops
        host.req_slots[:num_reqs] = plan.slots
        host.sample_rows[: len(plan.samples)] = ends[plan.samples] - 1
        ids = host.input_ids[:num_tokens]
        ids[:] = plan.input_ids
        ids[plan.in_flight] = self._last_token[plan.in_flight_slots]
        np.clip(ids, 0, self._params.vocab_size - 1, out=ids)  # whose were not fails alone
        host.token_types[:num_tokens] = 0 if plan.token_types is None else plan.token_types
        positions = host.positions[:num_tokens]
        positions[:] = np.arange(num_tokens, dtype=np.int32)
        positions -= np.repeat(ends - lens - plan.starts, lens)
        pages = host.page_table[np.repeat(plan.slots, lens), positions // page_size]
        host.out_slots[:num_tokens] = pages * page_size + positions % page_size
        self._batch.ready(num_tokens, num_reqs, len(plan.samples))

    def _sample(self, plan: StepPlan, logits_RV: torch.Tensor, found: _Found) -> None:
        if not len(plan.samples):
            return
        slots = plan.slots[plan.samples]
        positions = _positions(plan)
        rows = SamplingBatch(slots, positions, self._params)
        try:
            self._take(plan.samples, rows, logits_RV, found)
        except FAILURES:
            # One request's parameters are to blame, but not known which: each by itself.
            logits_RV = self._runner.logits(self._batch.host.sample_rows[: len(slots)].copy())
            for i in range(len(slots)):
                one = slice(i, i + 1)
                part = SamplingBatch(slots[one], positions[one], self._params)
                try:
                    self._take(plan.samples[one], part, logits_RV[one], found)
                except FAILURES as error:
                    found.errors[int(plan.samples[i])] = f"sampling failed: {error}"
        for index in plan.samples.tolist():
            if why := self._bad.get(int(plan.slots[index])):
                found.errors[index] = why

    def _take(
        self, indices: IntArray, rows: SamplingBatch, logits_RV: torch.Tensor, found: _Found
    ) -> None:
        """Sample some slices and note what they brought."""
        masks = self._constraints.masks(rows) if self._constraints is not None else None
        out = self._sampler.sample(logits_RV, rows, masks)
        self._last_token[rows.slots] = out.token_ids
        slices = indices.tolist()
        tokens = ((token,) for token in out.token_ids.tolist())
        found.token_ids.update(zip(slices, tokens, strict=True))
        found.logprobs.update((slices[row], value) for row, value in out.logprobs.items())
        found.errors.update((slices[row], why) for row, why in out.errors.items())
        if self._constraints is not None and self._adjust(indices, rows, out.token_ids, found):
            return
        self._params.sampled(rows.slots, out.token_ids)

    def _adjust(
        self, indices: IntArray, rows: SamplingBatch, token_ids: IntArray, found: _Found
    ) -> bool:
        """Let the constraints follow what was sampled; whether that changed and counted it."""
        assert self._constraints is not None
        outcomes = self._constraints.advance(rows, token_ids)
        if not outcomes:
            return False
        for row, outcome in outcomes.items():
            index, slot = int(indices[row]), int(rows.slots[row])
            found.token_ids[index] = outcome.tokens
            if outcome.tokens:  # a step in flight may feed the first; the others are known by then
                self._last_token[slot] = outcome.tokens[0]
            else:
                found.logprobs.pop(index, None)
                found.errors.pop(index, None)
            if outcome.ended:
                found.ended.add(index)
            if outcome.error:
                found.errors[index] = outcome.error
                found.refused.add(index)
        tokens = [found.token_ids[int(i)] for i in indices]
        slots = np.repeat(rows.slots, [len(t) for t in tokens])
        ids = np.fromiter((t for some in tokens for t in some), np.int32, len(slots))
        self._params.sampled(slots, ids)
        return True

    def _prompt_logprobs(self, plan: StepPlan, found: _Found) -> None:
        for want in plan.prompt:
            options = self._params.logprobs[plan.slots[want.index]]
            if options is None:
                continue
            try:
                found.prompt[want.index] = self._prompt_part(want.rows, want.token_ids, options)
            except FAILURES as error:
                found.errors[want.index] = f"prompt log probabilities failed: {error}"

    def _prompt_part(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> TokenLogprobs:
        """In blocks of rows, so that memory does not grow with the prompt."""
        parts: list[TokenLogprobs] = []
        for start in range(0, len(rows), self._prompt_rows):
            block = slice(start, start + self._prompt_rows)
            logits = self._runner.logits(rows[block])
            parts.append(token_logprobs(logits, token_ids[block], options))
        return join(parts)

    def _pool(self, plan: StepPlan, found: _Found) -> None:
        ends = np.cumsum(plan.stops - plan.starts)
        for work in plan.embeds:
            index = work.index
            if self._pooler is None:
                found.errors[index] = "this model makes no vectors"
                continue
            count = int(plan.stops[index] - plan.starts[index])
            rows = np.arange(ends[index] - count, ends[index], dtype=np.int32)
            try:
                vector = self._pooler.add(self._runner, int(plan.slots[index]), rows, work)
            except FAILURES as error:
                found.errors[index] = f"pooling failed: {error}"
                continue
            if vector is not None:
                found.vectors[index] = vector


def _within(request: GenerateRequest, vocab_size: int) -> bool:
    """Whether a kernel may look up the ids; the edge has refused others already."""
    parts = (request.input_ids, request.output_ids)
    return all(not len(p) or (p.min() >= 0 and p.max() < vocab_size) for p in parts)


def _positions(plan: StepPlan) -> NDArray[np.int64]:
    """Of the tokens that are sampled."""
    return plan.stops[plan.samples].astype(np.int64)


def _output(found: _Found, index: int) -> SliceOutput:
    if index in found.errors:
        status = 400 if index in found.refused else 500
        return SliceOutput(error=found.errors[index], status=status)
    return SliceOutput(
        token_ids=found.token_ids.get(index, ()),
        ended=index in found.ended,
        logprobs=found.logprobs.get(index),
        prompt_logprobs=found.prompt.get(index),
        vector=found.vectors.get(index),
    )
