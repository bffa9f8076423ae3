"""Sampling parameters of requests by slot, and the errors of requests that cannot be sampled."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.step import Join, StepPlan
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots


class RequestSlots:
    """Sampling parameters of all request slots; `apply` updates them by each plan.

    Attributes:
        params: Sampling parameters as arrays over slots.
        errors: Slot -> error that its request gets at its next sample.
        newest: The newest token of each slot, (slots,); backends that sample at once keep it.
        table_rows: Rows of the embedding table.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, media_ids: int = 0, table_rows: int = 0
    ) -> None:
        """`media_ids`, `table_rows`: ids of prompts with media, and table rows, if more than V."""
        self._media_ids = max(vocab_size, media_ids)
        self.table_rows = max(vocab_size, table_rows)
        self.params = SamplingSlots(num_slots, vocab_size)
        self.errors: dict[int, str] = {}
        self.newest: IntArray = np.zeros(num_slots, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Apply leaves, then joins."""
        for slot in plan.leaves:
            self.params.leave(slot)
            self.errors.pop(slot, None)
        for join in plan.joins:
            self._join(join)

    def rows(self, plan: StepPlan) -> SamplingBatch:
        """Sampling parameters of the step's sampled rows."""
        return SamplingBatch(plan.sample_slots, plan.sample_positions, self.params)

    def fail(self, slot: int, error: Exception) -> None:
        """Record that the parameters of the request in `slot` are invalid."""
        self.errors[slot] = f"sampling parameters cannot be used: {error}"

    def _join(self, join: Join) -> None:
        slot = join.slot
        self.errors.pop(slot, None)
        if isinstance(join.request, EmbedRequest):
            return
        count = self._media_ids if join.request.media else self.params.vocab_size
        if not _within(join.request, count):
            self.errors[slot] = f"token ids must be in 0..{count - 1}"
        try:
            self.params.join(slot, join.request, join.outputs)
        except FAILURES as error:
            self.params.leave(slot)
            self.fail(slot, error)


def _within(request: GenerateRequest, count: int) -> bool:
    """Whether all ids are below `count`; the server has already checked them."""
    parts = (request.input_ids, request.output_ids)
    return all(not len(ids) or ids.view(np.uint32).max() < count for ids in parts)
