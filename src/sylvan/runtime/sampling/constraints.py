"""What constrains the outputs of some requests while they are sampled, such as a grammar."""

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
    """Which ids may be sampled, for the rows that are constrained.

    `rows` (n,) are ascending rows of the batch; bit i of a row of `bits`, int32 (n, at least
    ceil(V / 32)), allows id i.
    """

    rows: IntArray
    bits: IntArray

    def of(self, row: int) -> Masks | None:
        """The mask of one row, for a batch of that row alone; None if it has none."""
        found = np.flatnonzero(self.rows == row)
        return Masks(np.zeros(1, np.int32), self.bits[found]) if len(found) else None


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What becomes of a row that was sampled.

    `tokens` is what the request gets instead of the sampled id alone: none if the row is void, or
    that id and others that are certain to follow. `ended`: the output is complete with them. An
    `error` fails the request.
    """

    tokens: tuple[int, ...] = ()
    ended: bool = False
    error: str = ""


class Constraints(Protocol):
    """The data half of a feature that lives beside the sampler; called by the worker's thread.

    Each step calls `leave` and `join` for requests that changed. Unless `idle` then, it goes on
    with `prepare`, then once or more `masks`, each time followed by `advance` with the same batch.
    """

    @property
    def idle(self) -> bool:
        """Whether no request is constrained."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `masks` would not have to wait for what was prepared."""
        ...

    def join(self, slot: int, request: GenerateRequest, outputs: IntArray) -> None:
        """A request enters a slot, having generated `outputs` already."""
        ...

    def leave(self, slot: int) -> None:
        """The request in `slot` is gone."""
        ...

    def bound(self, slot: int) -> bool:
        """Whether the outputs of the request in `slot` are constrained."""
        ...

    def prepare(self, slots: IntArray, positions: NDArray[np.int64]) -> bool:
        """These slots are going to be sampled for these positions; must not take long.

        Masks that are no matter of microseconds are computed while the forward pass runs; see
        `ready`. Returns whether there will be any: if not, `masks` need not be asked.
        """
        ...

    def masks(self, batch: SamplingBatch) -> Masks | None:
        """Constraints of the rows of `batch`, which was prepared; None if no row has any.

        They may be overwritten by the next `prepare`.
        """
        ...

    def advance(self, batch: SamplingBatch, token_ids: IntArray) -> dict[int, RowOutcome]:
        """Rows of `batch` that come to something else than their sampled id alone."""
        ...
