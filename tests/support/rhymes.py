"""Constraints that need the ids of each step, and force or replace some of them."""

from __future__ import annotations

import numpy as np

from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.sampling.constraints import Masks, RowOutcome
from tests.support.random_model import VOCAB


class Rhymes:
    """Each id must be congruent to its position modulo 3.

    A multiple of 5 is followed by two forced tokens, and a multiple of 7 is replaced by 8. Requests
    with prompts longer than 18 are unconstrained.
    """

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.rows: list[int] = []
        self.due: set[int] = set()
        self.kinds: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self.next

    @property
    def ready(self) -> bool:
        return len(self.due) != 2  # both ways occur

    def join(self, slot, request, outputs) -> None:
        self.next.pop(slot, None)
        if len(request.input_ids) <= 18:
            self.next[slot] = len(request.input_ids) + len(outputs)

    def leave(self, slot) -> None:
        self.next.pop(slot, None)

    def constrains(self, slot) -> bool:
        return slot in self.next

    def prepare(self, slots, positions) -> bool:
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        self.due = {s for s, p in pairs if s in self.next and p >= self.next[s]}
        return bool(self.due)

    def masks(self, batch):
        rows = [r for r, s in enumerate(batch.slots.tolist()) if s in self.due]
        if not rows:
            return None
        ids = np.arange(-(-VOCAB // 32) * 32)
        allowed = ids[None] % 3 == batch.positions[rows][:, None] % 3
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return Masks(np.array(rows, np.int32), bits)

    def advance(self, batch, token_ids):
        outcomes = {}
        rows = zip(batch.slots.tolist(), batch.positions.tolist(), token_ids.tolist(), strict=True)
        for row, (slot, position, token) in enumerate(rows):
            if slot not in self.next:
                continue
            if position < self.next[slot]:
                outcomes[row] = RowOutcome()
                self.kinds.add("void")
                continue
            tokens = (token,)
            if token % 5 == 0:
                tokens = (token, 1, 2)
                self.kinds.add("certain")
            elif token % 7 == 0:
                tokens = (8,)
                self.kinds.add("replaced")
            if tokens != (token,):
                outcomes[row] = RowOutcome(tokens)
            self.next[slot] = position + len(tokens)
        return outcomes


class RhymesWorker(CapabilityWorker):
    """Passes the constraints to a worker."""

    def __init__(self, rhymes: Rhymes) -> None:
        self._rhymes = rhymes

    @property
    def constraints(self) -> Rhymes:
        return self._rhymes


def constrained(rhymes: Rhymes) -> ExecutorParts:
    """Return the parts of an executor whose outputs follow the constraints."""
    return ExecutorParts((*STANDARD_WORKERS, lambda context: RhymesWorker(rhymes)))
