"""One rank: has plans computed and sampled, and tells what that brought.

Shapes: T rows of the step, R slices, S request slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sylvan.protocol.arrays import FloatArray, IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.req import SliceOutput, StepResult
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.plan import Join, StepPlan
from sylvan.runtime.executor.pooling import Pooler
from sylvan.runtime.executor.runner import GraphRunner
from sylvan.runtime.executor.steps import Step, TensorStep
from sylvan.runtime.sampling.api import SampleOutput, TokenSampler
from sylvan.runtime.sampling.constraints import Constraints, Outcome
from sylvan.runtime.sampling.logprobs import join
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots

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
        sampler: TokenSampler,
        vocab_size: int,
        pooler: Pooler | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        num_slots = batch.limits.max_reqs
        self._runner = runner
        self._batch = batch
        self._sampler = sampler
        self._params = params = SamplingSlots(num_slots, vocab_size)
        self._pooler = pooler
        self._constraints = constraints
        self._last_token: IntArray = np.zeros(num_slots, np.int32)
        self._step: Step = runner.fuse(batch, sampler, self._last_token, params) or TensorStep(
            runner, batch, self._last_token, vocab_size
        )
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
        rows = None  # that are sampled, if some may be constrained
        if self._constraints is not None and not self._constraints.idle:
            rows = SamplingBatch(plan.sample_slots, plan.sample_positions, self._params)
        try:
            self._copy_pages(plan)
            drawn = self._compute(plan, rows)
        except FAILURES as error:
            raise failure(error) from error
        if drawn is not None and self._is_plain(plan, drawn):
            return self._plain_result(plan, drawn, rows)
        return StepResult(self._results(plan, drawn))

    def _compute(self, plan: StepPlan, rows: SamplingBatch | None) -> SampleOutput | None:
        """Run the step; its tokens, or None if they are to be drawn once masks are there."""
        constraints = self._constraints
        if (
            constraints is None
            or rows is None
            or not constraints.prepare(rows.slots, rows.positions)
        ):
            return self._step.run(plan, draw=True)
        if not constraints.ready:
            return self._step.run(plan, draw=False)
        return self._step.run(plan, draw=True, masks=constraints.masks(rows))

    def _is_plain(self, plan: StepPlan, drawn: SampleOutput) -> bool:
        """Whether slices bring one token or none, and nothing else."""
        return not (self._bad or plan.prompt or plan.embeds or drawn.logprobs or drawn.errors)

    def _plain_result(
        self, plan: StepPlan, drawn: SampleOutput, rows: SamplingBatch | None
    ) -> StepResult:
        """One token for each that samples, but for what the constraints make of some."""
        slots, token_ids = plan.sample_slots, drawn.token_ids
        outcomes = {}
        if self._constraints is not None and rows is not None:
            outcomes = self._constraints.advance(rows, token_ids)
        if not outcomes:
            self._params.sampled(slots, token_ids)
            return _by_slice(plan, token_ids.tolist(), {})
        tokens: list[Sequence[int]] = [(token,) for token in token_ids.tolist()]
        for row, outcome in outcomes.items():
            tokens[row] = outcome.tokens
            self._newest(int(slots[row]), outcome)
        self._count(slots, tokens)
        others = {row: _changed(outcome) for row, outcome in outcomes.items()}
        return _by_slice(plan, token_ids.tolist(), others)

    def _newest(self, slot: int, outcome: Outcome) -> None:
        """A step in flight may feed the first token; the others are known by then."""
        if outcome.tokens:
            self._last_token[slot] = outcome.tokens[0]

    def _count(self, slots: IntArray, tokens: Sequence[Sequence[int]]) -> None:
        """Count the tokens that each slot got."""
        if not self._params.counts:
            return
        each = np.repeat(slots, [len(t) for t in tokens])
        ids = np.fromiter((t for some in tokens for t in some), np.int32, len(each))
        self._params.sampled(each, ids)

    def _results(self, plan: StepPlan, drawn: SampleOutput | None) -> list[SliceOutput]:
        found = _Found()
        with torch.inference_mode():
            self._sample(plan, drawn, found)
            self._prompt_logprobs(plan, found)
            self._pool(plan, found)
        return [_output(found, index) for index in range(plan.num_slices)]

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

    def _sample(self, plan: StepPlan, drawn: SampleOutput | None, found: _Found) -> None:
        if not plan.num_samples:
            return
        samples = plan.samples
        rows = SamplingBatch(plan.sample_slots, plan.sample_positions, self._params)
        if drawn is not None:
            self._note(samples, rows, drawn, found)
        else:
            self._draw(samples, rows, found)
        for index in samples.tolist() if self._bad else ():
            if why := self._bad.get(int(plan.slots[index])):
                found.errors[index] = why

    def _draw(self, samples: IntArray, rows: SamplingBatch, found: _Found) -> None:
        try:
            self._note(samples, rows, self._choose(rows, self._step.logits()), found)
        except FAILURES:
            # One request's parameters are to blame, but not known which: each by itself.
            count = len(samples)
            logits_RV = self._runner.logits(self._batch.host.sample_rows[:count].copy())
            for i in range(count):
                one = slice(i, i + 1)
                part = SamplingBatch(rows.slots[one], rows.positions[one], self._params)
                try:
                    chosen = self._choose(part, logits_RV[one])
                    self._note(samples[one], part, chosen, found)
                except FAILURES as error:
                    found.errors[int(samples[i])] = f"sampling failed: {error}"

    def _choose(self, rows: SamplingBatch, logits_RV: torch.Tensor) -> SampleOutput:
        masks = self._constraints.masks(rows) if self._constraints is not None else None
        return self._sampler.sample(logits_RV, rows, masks)

    def _note(
        self, indices: IntArray, rows: SamplingBatch, out: SampleOutput, found: _Found
    ) -> None:
        """What sampling some slices brought."""
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
            index = int(indices[row])
            found.token_ids[index] = outcome.tokens
            self._newest(int(rows.slots[row]), outcome)
            if not outcome.tokens:
                found.logprobs.pop(index, None)
                found.errors.pop(index, None)
            if outcome.ended:
                found.ended.add(index)
            if outcome.error:
                found.errors[index] = outcome.error
                found.refused.add(index)
        self._count(rows.slots, [found.token_ids[int(i)] for i in indices])
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
            parts.append(self._sampler.token_logprobs(logits, token_ids[block], options))
        return join(parts)

    def _pool(self, plan: StepPlan, found: _Found) -> None:
        ends = np.cumsum(plan.stops - plan.starts)
        for work in plan.embeds:
            index = work.index
            if self._pooler is None:
                found.errors[index] = "this model makes no vectors"
                continue
            count = int(plan.stops[index] - plan.starts[index])
            end = int(ends[index])
            rows = np.arange(end - count, end, dtype=np.int32)
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
    return all(not len(ids) or ids.view(np.uint32).max() < vocab_size for ids in parts)


def _by_slice(plan: StepPlan, tokens: list[int], others: dict[int, SliceOutput]) -> StepResult:
    """What the sampled rows brought, slice by slice; the others bring nothing."""
    if plan.num_samples == plan.num_slices:
        return StepResult(tokens=tokens, others=others)
    found = [-1] * plan.num_slices
    changed: dict[int, SliceOutput] = {}
    for row, (index, token) in enumerate(zip(plan.samples.tolist(), tokens, strict=True)):
        found[index] = token
        if row in others:
            changed[index] = others[row]
    for index, token in enumerate(found):
        if token < 0:
            changed[index] = SliceOutput()
    return StepResult(tokens=found, others=changed)


def _changed(outcome: Outcome) -> SliceOutput:
    if outcome.error:
        return SliceOutput(error=outcome.error, status=400)
    return SliceOutput(outcome.tokens, ended=outcome.ended)


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
