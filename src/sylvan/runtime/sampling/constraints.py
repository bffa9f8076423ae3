"""Constraints on sampled tokens, such as grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.sampling.params import SamplingBatch


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed ids of constrained rows.

    `rows` (n,) are ascending rows of the batch; bit i of a row of `bits`, int32 (n, at least ceil(V
    / 32)), allows id i.
    """

    rows: IntArray
    bits: IntArray

    def of(self, row: int) -> Masks | None:
        """The mask of one row as a batch of one; None: the row has no mask."""
        found = np.flatnonzero(self.rows == row)
        return Masks(np.zeros(1, np.int32), self.bits[found]) if len(found) else None


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Outcome of a sampled row, as decided by constraints.

    `tokens` replaces the sampled id: the id and forced ids after it, or none if the sample is
    discarded. `ended`: they complete the output. An `error` fails the request.
    """

    tokens: tuple[int, ...] = ()
    ended: bool = False
    error: str = ""


class Constraints(Protocol):
    """Token masks of a capability, and the state behind them; called by the worker's thread.

    Each step calls `leave` and `join` for changed requests. Unless `idle`, it then calls `prepare`,
    and one or more times `masks` followed by `advance` with the same batch.
    """

    @property
    def idle(self) -> bool:
        """Whether no request is constrained."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `masks` would return without waiting."""
        ...

    def join(self, slot: int, request: GenerateRequest, outputs: IntArray) -> None:
        """A request enters a slot, having generated `outputs` already."""
        ...

    def leave(self, slot: int) -> None:
        """The request in `slot` has ended."""
        ...

    def constrains(self, slot: int) -> bool:
        """Whether the outputs of the request in `slot` are constrained."""
        ...

    def prepare(self, slots: IntArray, positions: NDArray[np.int64]) -> bool:
        """Announce the slots and positions to be sampled; must be fast.

        Slow masks are computed during the forward pass; see `ready`. Returns whether there will be
        any masks; if not, skip `masks`.
        """
        ...

    def masks(self, batch: SamplingBatch) -> Masks | None:
        """Constraints of the rows of `batch`, which was prepared; None if no row has any.

        They may be overwritten by the next `prepare`.
        """
        ...

    def advance(self, batch: SamplingBatch, token_ids: IntArray) -> dict[int, RowOutcome]:
        """Outcomes of the rows of `batch` that differ from their sampled id."""
        ...
