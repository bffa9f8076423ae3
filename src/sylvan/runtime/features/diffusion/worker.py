"""Worker half: fills the masked positions of a step, in as many forward passes as needed.

Each pass predicts all masked positions of a block. The most confident predictions become tokens,
which the next pass sees (arXiv:2503.09573 for blocks, arXiv:2502.09992 for the order). A last pass
computes the KV of the complete block.

Shapes: S rows of masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from sylvan.protocol.arrays import EMPTY_IDS, FloatArray, IntArray
from sylvan.protocol.logprobs import join as join_logprobs
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.step import Join, SliceOutput, StepPlan
from sylvan.runtime.executor.capability import CapabilityWorker, StepContext
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.executor.rounds import Verified
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.features.diffusion.control import Diffusion
from sylvan.runtime.features.diffusion.work import FillWork
from sylvan.runtime.models.config import BlockDiffusion
from sylvan.runtime.sampling.api import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch


@dataclass(frozen=True, slots=True)
class FillSchedule:
    """Most passes per block, and the confidence at which a prediction is accepted at once.

    `last_time`: see `BlockDiffusion`.
    """

    steps: int
    confidence: float
    last_time: float = 0.0

    def quota(self, block: int, step: int) -> int:
        """Minimum positions to fill in pass `step`, from 0, so that `steps` passes suffice."""
        steps = min(self.steps, block)
        each, more = divmod(block, steps)
        return max(1, each + (step < more))

    def timed_quota(self, block: int, left: int, step: int) -> int:
        """Number of the `left` positions to fill in pass `step`, by its time; may be 0.

        The last pass fills the rest. Source: `generation_utils.py` of Dream's checkpoints.
        """
        steps = min(self.steps, block)
        if step >= steps - 1:
            return left
        now, then = (1 - (1 - self.last_time) * at / steps for at in (step, step + 1))
        return int(left * (1 - then / now))


def chosen(
    chances_S: FloatArray, quota: int, confidence: float, order_S: FloatArray | None = None
) -> IntArray:
    """Select the positions that become tokens: all confident ones, or at least the `quota` best.

    Args:
        chances_S: Probability of each prediction.
        quota: Minimum number of positions to fill.
        confidence: Probability above which a prediction is accepted at once.
        order_S: Rank of each prediction, best largest; None: its probability.
    """
    certain = np.flatnonzero(chances_S > confidence)
    if len(certain) >= quota:
        return certain.astype(np.int32)
    order_S = chances_S if order_S is None else order_S
    return np.sort(np.argsort(-order_S, kind="stable")[:quota]).astype(np.int32)


@dataclass(slots=True, eq=False)
class Filling:
    """A slice that is being filled.

    Attributes:
        index: Index of the slice in the step.
        slot: Slot of the request.
        start: Position of the first row.
        ids: Tokens of all rows; the mask at open positions.
        open: Masked positions in `ids` to fill now, ascending; later ones may follow.
    """

    index: int
    slot: int
    start: int
    ids: IntArray
    open: IntArray
    schedule: FillSchedule
    first: int = 0
    size: int = 0
    step: int = 0
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    error: str = ""

    def __post_init__(self) -> None:
        self.first = int(self.open[0]) if len(self.open) else len(self.ids)
        self.size = len(self.open)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.ids)

    def output(self) -> SliceOutput:
        """The tokens; the KV of the newest is recomputed together with the next block."""
        if self.error:
            return SliceOutput(error=self.error)
        tokens = tuple(self.ids[self.first : self.first + self.size].tolist())
        kept = [self.logprobs[i] for i in sorted(self.logprobs)]
        logprobs = join_logprobs(kept) if kept else None
        return SliceOutput(tokens, logprobs=logprobs, accepted=len(tokens) - 1)


class DiffusionWorker(CapabilityWorker):
    """Fills blocks on the CPU.

    Args:
        shape: Size of blocks, and the mask token.
        schedule: Default schedule; requests may have their own.
        order: Which positions are filled first; see `DiffusionConfig.order`.
    """

    name: ClassVar = Diffusion.name

    def __init__(
        self, shape: BlockDiffusion, schedule: FillSchedule, order: str = "probability"
    ) -> None:
        self._block, self._mask_id = shape.block, shape.mask_id
        self._shape, self._order = shape, order
        self._default = schedule
        self._schedules: dict[int, FillSchedule] = {}
        self._work = FillWork()

    @property
    def filler(self) -> DiffusionWorker:
        """Replaces the single forward pass of a step."""
        return self

    def join(self, join: Join) -> None:
        """Store the schedule of a request."""
        request = join.request
        if not isinstance(request, GenerateRequest):
            return
        steps, confidence = request.denoising_steps, request.confidence
        self._schedules[join.slot] = FillSchedule(
            steps or self._default.steps,
            self._default.confidence if confidence is None else confidence,
            self._default.last_time,
        )

    def before_forward(self, step: StepContext, work: FillWork) -> None:
        """Store which slices this step fills."""
        self._work = work

    def fill(self, plan: StepPlan, backend: ImmediateBackend, slots: RequestSlots) -> Verified:
        """Compute a step."""
        fillings = self._fillings(plan)
        others = [i for i in range(plan.num_slices) if i not in fillings]
        if others and not self._shape.whole:  # else all rows are computed with the masked ones
            self._forward(backend, self._prompts(plan, others))
        for group in self._groups(list(fillings.values()), backend):
            self._fill(group, backend, slots)
        outputs = [
            fillings[i].output() if i in fillings else SliceOutput() for i in range(plan.num_slices)
        ]
        return Verified(outputs, SampleOutput(np.zeros(plan.num_samples, np.int32), {}, {}))

    # ---- inside

    def _fillings(self, plan: StepPlan) -> dict[int, Filling]:
        """The slices of a step with masked positions, by index."""
        num_masked = {draft.index: len(draft.parents) for draft in plan.drafts}
        ends, found = plan.ends, dict[int, Filling]()
        for part in self._work.slices:
            count, slot = num_masked[part.index], int(plan.slots[part.index])
            start = int(plan.starts[part.index])
            rows = slice(int(ends[part.index]) - (int(plan.stops[part.index]) - start), None)
            ids = plan.input_ids[rows][: int(plan.stops[part.index]) - start]
            whole = np.concatenate([part.head, ids]).astype(np.int32)
            whole[len(whole) - count :] = self._mask_id
            open_ = np.arange(len(whole) - count, len(whole), dtype=np.int32)[: part.fills]
            found[part.index] = Filling(
                part.index,
                slot,
                start - len(part.head),
                whole,
                open_,
                self._schedules.get(slot, self._default),
            )
        return found

    def _prompts(self, plan: StepPlan, indices: Sequence[int]) -> list[Filling]:
        """Slices without masked positions, as parts."""
        ends, found = plan.ends, list[Filling]()
        for i in indices:
            start, stop = int(plan.starts[i]), int(plan.stops[i])
            ids = plan.input_ids[int(ends[i]) - (stop - start) : int(ends[i])]
            found.append(Filling(i, int(plan.slots[i]), start, ids, EMPTY_IDS, self._default))
        return found

    def _groups(
        self, fillings: Sequence[Filling], backend: ImmediateBackend
    ) -> Iterator[list[Filling]]:
        """Divide parts into groups that fit into a forward pass."""
        limits, group = backend.batch.limits, list[Filling]()
        rows = num_masked = 0
        for part in fillings:
            rows, num_masked = rows + len(part.ids), num_masked + len(part.open)
            full = rows > limits.max_tokens or num_masked > limits.max_sampled_rows
            if group and (full or len(group) >= limits.max_reqs):
                yield group
                group, rows, num_masked = [], len(part.ids), len(part.open)
            group.append(part)
        if group:
            yield group

    def _fill(
        self, group: Sequence[Filling], backend: ImmediateBackend, slots: RequestSlots
    ) -> None:
        left = list(group)
        while left:
            self._forward(backend, left)
            todo = [part for part in left if len(part.open)]
            if todo:
                self._take(todo, backend, slots)
            # a part without masked positions is done, unless this pass has completed it; if the
            # whole text is seen, its KV has no use
            left = [
                part
                for part in todo
                if not part.error and (len(part.open) or not self._shape.whole)
            ]

    def _take(
        self, todo: Sequence[Filling], backend: ImmediateBackend, slots: RequestSlots
    ) -> None:
        """Sample all masked positions, and keep the most confident ones."""
        masked = [part.start + part.open for part in todo]
        each = np.repeat([part.slot for part in todo], [len(part.open) for part in todo])
        positions = np.concatenate(masked).astype(np.int64)
        batch = SamplingBatch(each.astype(np.int32), positions, slots.params)
        drawn, chances_S, order_S = self._draw(batch, backend)
        row = 0
        for part in todo:
            count = len(part.open)
            some = slice(row, row + count)
            wrong = (drawn.errors[r] for r in range(row, row + count) if r in drawn.errors)
            part.error = next(wrong, "")
            quota = self._num_to_fill(part)
            kept = chosen(chances_S[some], quota, part.schedule.confidence, order_S[some])
            for i in kept.tolist():
                at = int(part.open[i])
                part.ids[at] = drawn.token_ids[row + i]
                if (logprobs := drawn.logprobs.get(row + i)) is not None:
                    part.logprobs[at] = logprobs
            part.open = np.delete(part.open, kept)
            part.step += 1
            row += count

    def _num_to_fill(self, part: Filling) -> int:
        """Number of positions of a part to fill now; passes that would fill none are left out."""
        if not self._shape.last_time:
            return part.schedule.quota(part.size if self._shape.whole else self._block, part.step)
        while not (quota := part.schedule.timed_quota(part.size, len(part.open), part.step)):
            part.step += 1
        return quota

    def _draw(
        self, batch: SamplingBatch, backend: ImmediateBackend
    ) -> tuple[SampleOutput, FloatArray, FloatArray]:
        """Sample all rows without the mask token; return probabilities and ranks of the samples."""
        every = np.arange(len(batch.slots), dtype=np.int32)
        with torch.inference_mode():
            backend.logits_SV[:, self._mask_id] = -torch.inf
            held_SV = backend.logits_SV.float().log_softmax(-1)
        drawn = backend.draw_rows(every, batch, None)
        with torch.inference_mode():
            ids_S1 = torch.from_numpy(drawn.token_ids).long().clamp(min=0)[:, None]
            chances = held_SV.gather(1, ids_S1)[:, 0].exp()
            return drawn, chances.numpy(), self._ordered(held_SV, chances).numpy()

    def _ordered(self, held_SV: torch.Tensor, chances_S: torch.Tensor) -> torch.Tensor:
        """Return the rank of each prediction, best largest. Shape: (S,)."""
        if self._order == "entropy":
            return torch.xlogy(held_SV.exp(), held_SV.exp()).sum(-1)
        if self._order == "margin":
            best, second = held_SV.topk(2, -1).values.exp().unbind(-1)
            return best - second
        return chances_S

    def _forward(self, backend: ImmediateBackend, parts: Sequence[Filling]) -> None:
        """Run the rows of all parts, with logits for masked positions."""
        lens = np.array([len(part.ids) for part in parts], np.int32)
        firsts = np.cumsum(lens, dtype=np.int32) - lens
        samples = np.repeat(np.arange(len(parts)), [len(part.open) for part in parts])
        rows = [
            first + part.open - self._shape.shifted
            for first, part in zip(firsts, parts, strict=True)
        ]
        numbers = np.concatenate(
            [
                np.array([part.slot for part in parts], np.int32),
                np.array([part.start for part in parts], np.int32),
                np.array([part.stop for part in parts], np.int32),
                samples.astype(np.int32),
                *(part.ids for part in parts),
            ]
        )
        plan = StepPlan(
            num_slices=len(parts),
            num_tokens=int(lens.sum()),
            num_samples=len(samples),
            num_in_flight=0,
            numbers=numbers.astype(np.int32),
            sample_rows=np.concatenate(rows).astype(np.int32),
        )
        backend.batch.drafts = ()
        backend.batch.row_ends = np.concatenate([self._ends(part) for part in parts])
        backend.forward(plan, graph=False)

    def _ends(self, part: Filling) -> IntArray:
        """Return the end of each row's attention: its block, as far as it exists."""
        positions = np.arange(part.start, part.stop, dtype=np.int32)
        if self._shape.whole:
            return np.full_like(positions, part.stop)
        return np.minimum((positions // self._block + 1) * self._block, part.stop).astype(np.int32)
