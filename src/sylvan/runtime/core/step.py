"""The step contract: the data that scheduler and executor exchange.

A `StepPlan` goes to the executor, a `StepResult` comes back. Both are structs of numbers that can
be written to a file, sent to another process and broadcast to ranks (see `core.wire`).

Shapes: T rows (tokens to compute), R slices (one per request of the step), S sampled rows, F rows
in flight (an earlier, still running step samples their token).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import EmbedRequest, GenerateRequest

STEP_FORMAT = 2
"""Format number of plans and results; it changes with every field."""

NO_PAGES: IntArray = np.empty((4, 0), np.int32)
"""No page table changes; see `StepPlan.pages`."""


class Join(msgspec.Struct, frozen=True):
    """A request enters request slot `slot`, having generated `outputs` already."""

    slot: int
    request: GenerateRequest | EmbedRequest
    outputs: np.ndarray  # int32


class PageCopy(NamedTuple):
    """Copy the first `num_tokens` entries of page `source` to page `target` of a KV group."""

    source: int
    target: int
    num_tokens: int
    group: int = 0


@functools.lru_cache(256)
def chain(count: int) -> tuple[int, ...]:
    """Parents of a chain of that many draft tokens."""
    return tuple(range(-1, count - 1))


class DraftRows(msgspec.Struct, frozen=True):
    """The last rows of slice `index` are draft tokens to verify.

    `parents[i]` is the parent of draft token i, or -1 for the last known token: a chain is
    (-1, 0, 1, ...), anything else a tree. Each draft token and the last known token are sampled.
    """

    index: int
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        """Whether each draft token follows the one before it."""
        return self.parents == chain(len(self.parents))


EMBEDDINGS = -1
"""The layer before the first one."""


class InputEmbeds(msgspec.Struct, frozen=True):
    """Rows [row, row + n) of the step read these vectors instead of token embeddings.

    With a `layer` they are added to the output of that layer.
    """

    row: int
    vectors: np.ndarray  # float32 (n, D)
    layer: int = EMBEDDINGS


class StepPlan(msgspec.Struct, kw_only=True):
    """Everything a step needs.

    `numbers` holds, one after another: request slots, first positions and positions after the last
    of each slice (3, R); the slice index of each sampled row (S,); rows in flight and the request
    slots whose newest token they read (2, F); token ids (T,). Ids of rows in flight mean nothing.

    Attributes:
        number: Step number, counted by the scheduler.
        copies: Page copies before the forward pass.
        leaves: Request slots that are free from this step on; before `joins`.
        pages: Changes of page tables, (4, N): KV groups, request slots, entries, page numbers.
        token_types: (T,); None: all 0.
        positions: Rotary positions, (T,) or (3, T) for temporal, height and width; None: each slice
            counts up from its start.
        sample_rows: (S,); None: the last row of each slice that samples.
        drafts: Slices with draft tokens, in order.
        embeds: Rows whose inputs are vectors, in order.
        work: Data for the worker halves of capabilities, by name; absent without work.
    """

    num_slices: int
    num_tokens: int
    num_samples: int
    num_in_flight: int
    numbers: np.ndarray  # int32
    format: int = STEP_FORMAT
    number: int = 0
    copies: tuple[PageCopy, ...] = ()
    leaves: Sequence[int] = ()
    joins: Sequence[Join] = ()
    pages: np.ndarray = NO_PAGES
    token_types: np.ndarray | None = None  # int32
    positions: np.ndarray | None = None  # int32
    sample_rows: np.ndarray | None = None  # int32
    drafts: tuple[DraftRows, ...] = ()
    embeds: tuple[InputEmbeds, ...] = ()
    work: dict[str, Any] = {}

    @property
    def slots(self) -> IntArray:
        """Request slots, (R,)."""
        return self.numbers[: self.num_slices]

    @property
    def starts(self) -> IntArray:
        """First positions, (R,)."""
        return self.numbers[self.num_slices : 2 * self.num_slices]

    @property
    def stops(self) -> IntArray:
        """Positions after the last, draft tokens included, (R,)."""
        return self.numbers[2 * self.num_slices : 3 * self.num_slices]

    @property
    def samples(self) -> IntArray:
        """Slice index of each sampled row, (S,)."""
        return self.numbers[3 * self.num_slices :][: self.num_samples]

    @property
    def sample_slots(self) -> IntArray:
        """Request slot of each sampled row, (S,)."""
        plain = self.num_samples == self.num_slices and not self.drafts
        return self.slots if plain else self.slots[self.samples]

    @property
    def sample_positions(self) -> NDArray[np.int64]:
        """Sequence position of each sampled token, (S,)."""
        if self.sample_rows is None:
            return self.stops[self.samples].astype(np.int64)
        return self.row_positions()[self.sample_rows].astype(np.int64) + 1

    @property
    def in_flight(self) -> IntArray:
        """Rows whose input id the previous step samples, (F,)."""
        return self.numbers[3 * self.num_slices + self.num_samples :][: self.num_in_flight]

    @property
    def in_flight_slots(self) -> IntArray:
        """Request slots whose newest token the rows in flight read, (F,)."""
        return self.numbers[-self.num_tokens - self.num_in_flight :][: self.num_in_flight]

    @property
    def input_ids(self) -> IntArray:
        """Token ids, (T,); undefined for rows in flight."""
        return self.numbers[len(self.numbers) - self.num_tokens :]

    @property
    def ends(self) -> IntArray:
        """Row after the last of each slice, (R,)."""
        return np.cumsum(self.stops - self.starts, dtype=np.int32)

    def row_positions(self) -> IntArray:
        """Sequence position of each row, (T,): draft tokens count by their depth in the tree."""
        lens = self.stops - self.starts
        ends = np.cumsum(lens, dtype=np.int32)
        positions = np.arange(self.num_tokens, dtype=np.int32)
        positions -= np.repeat(ends - lens - self.starts, lens)
        for draft in self.drafts:
            first = int(ends[draft.index]) - len(draft.parents)
            positions[first : first + len(draft.parents)] = positions[first - 1] + depths(draft)
        return positions


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The ancestors of `node`, oldest first, then itself."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def depths(draft: DraftRows) -> IntArray:
    """Depth of each draft token in its tree; 1 for the first."""
    found: list[int] = []
    for parent in draft.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return np.array(found, np.int32)


class SliceOutput(msgspec.Struct):
    """The result of one slice.

    Attributes:
        token_ids: Empty if the slice samples nothing; several ids if drafts were accepted, or if a
            grammar forces the ids after the first. Forced ids lack KV, and later steps in flight
            sample nothing for this request.
        logprobs: Log probabilities of `token_ids`.
        ended: Whether the output is complete with `token_ids`.
        error: Fails this request only, with `status`.
        accepted: Number of accepted draft tokens, whose KV is kept; None: all of `token_ids` but
            the last.
    """

    token_ids: Sequence[int] = ()
    logprobs: TokenLogprobs | None = None  # of token_ids
    error: str = ""
    ended: bool = False
    status: int = 500
    accepted: int | None = None

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens that were right."""
        return max(0, len(self.token_ids) - 1) if self.accepted is None else self.accepted


class StepResult(msgspec.Struct):
    """The result of a step.

    Attributes:
        tokens: The id that each slice sampled, (R,); meaningless for slices in `others`.
        others: Outputs of slices with other than exactly one id, by index.
        reports: Messages of worker halves to their control halves, by capability.
    """

    tokens: Sequence[int] = ()
    others: dict[int, SliceOutput] = {}
    reports: dict[str, Any] = {}

    @classmethod
    def of(cls, outputs: Sequence[SliceOutput]) -> StepResult:
        """Build the result from the outputs of all slices."""
        plain = [len(o.token_ids) == 1 and _is_plain(o) for o in outputs]
        return cls(
            [o.token_ids[0] if ok else -1 for o, ok in zip(outputs, plain, strict=True)],
            {i: o for i, (o, ok) in enumerate(zip(outputs, plain, strict=True)) if not ok},
        )

    @property
    def outputs(self) -> list[SliceOutput]:
        """The outputs of all slices, in order."""
        others = self.others
        return [others.get(i) or SliceOutput((t,)) for i, t in enumerate(self.tokens)]


def _is_plain(output: SliceOutput) -> bool:
    return output.logprobs is None and not output.error and not output.ended
