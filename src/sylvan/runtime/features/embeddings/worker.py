"""Worker half: pools the hidden states of slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sylvan.protocol.arrays import FloatArray
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.embeddings.control import EmbeddingCapability, PoolSlice
from sylvan.runtime.features.embeddings.pooling import Pooler


class EmbeddingsWorker(CapabilityWorker):
    """Adds the rows of each slice to the pooled vector of its request."""

    name: ClassVar = EmbeddingCapability.name
    reads_rows: ClassVar = True

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler

    def before_forward(self, step: StepContext, work: Sequence[PoolSlice]) -> None:
        """Keep tokens from attending to those that are hidden."""
        if not any(part.hidden for part in work):
            return
        if step.batch.kv.layer_groups:
            for part in work:
                if part.hidden:
                    step.errors[part.index] = "a causal model cannot hide tokens from each other"
            return
        plan = step.plan
        lens = plan.stops - plan.starts
        ends = np.repeat(lens, lens).astype(np.int32)
        for part in work:
            stop = int(plan.ends[part.index])
            ends[stop - int(lens[part.index]) : stop] -= part.hidden
        step.batch.row_ends = ends

    def leave(self, slot: int) -> None:
        self._pooler.forget(slot)

    def after_forward(self, step: StepContext, work: Sequence[PoolSlice]) -> Report:
        plan, ends = step.plan, step.plan.ends
        vectors: dict[int, FloatArray] = {}
        for part in work:
            start = int(ends[part.index] - (plan.stops[part.index] - plan.starts[part.index]))
            rows = np.arange(start, int(ends[part.index]), dtype=np.int32)
            slot = int(plan.slots[part.index])
            with step.guard(part.index, "pooling failed"):
                if part.form == "item":
                    vector = self._pooler.of_item(step.items[int(rows[0])], part)
                else:
                    vector = self._pooler.add(step, slot, rows, part)
                if vector is not None:
                    vectors[part.index] = vector
        return lambda: vectors
