"""Places embeddings in the rows of a request, and computes their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.media import MediaItem
from sylvan.runtime.core.req import Batch, Slice
from sylvan.runtime.features.multimodal.positions import PromptPositions, prompt_positions
from sylvan.runtime.features.multimodal.work import CrossRows, RowPositions, VectorRows


class MediaPrompt:
    """A prompt with media items, while its request lives.

    Attributes:
        keys: Keys of its items, in order.
        stop: Position after the last placeholder.
        run_stop: Position after the last run of tokens that attend to each other, if `whole` or
            `prefix` is set (see `ModelMedia`): an item's, or all of the prompt.
        positions: Three-axis positions; None: text positions.
    """

    def __init__(
        self,
        input_ids: IntArray,
        media: Sequence[MediaItem],
        keys: Sequence[bytes],
        *,
        axes: bool,
        prefix: bool = False,
    ) -> None:
        self.keys = tuple(keys)
        self._places = [item.placeholders(input_ids) for item in media]
        self._runs = [run for places in self._places for run in _runs(places)]
        if prefix:
            self._runs = [(0, len(input_ids))]
        self.run_stop = max((end for _, end in self._runs), default=0)
        self.stop = max((int(p[-1]) + 1 for p in self._places if len(p)), default=0)
        self.positions: PromptPositions | None = None
        if axes:
            self.positions = prompt_positions(input_ids, media)

    def counts(self) -> list[int]:
        """Number of placeholders of each item."""
        return [len(places) for places in self._places]

    def needed(self, cached: int) -> list[bytes]:
        """Return the keys of items that are needed if the first `cached` tokens have KV."""
        pairs = zip(self.keys, self._places, strict=True)
        return [key for key, places in pairs if len(places) and places[-1] >= cached]

    def cut(self, start: int, size: int, limit: int) -> int:
        """Shrink a slice so that it contains each run entirely or not at all."""
        stop = start + size
        for first, end in self._runs:
            if first < stop < end:
                return end - start if end - start <= limit else max(0, first - start)
        return size

    def ends(self, piece: Slice) -> IntArray:
        """Return how many tokens each row of a slice attends to."""
        found = np.arange(piece.start + 1, piece.start + num_rows(piece) + 1, dtype=np.int32)
        for first, end in self._runs:
            low, high = max(first, piece.start), min(end, piece.stop)
            if low < high:
                found[low - piece.start : high - piece.start] = end
        return found

    def cross(self, start: int, count: int, row: int) -> Iterator[CrossRows]:
        """Return which rows attend to which items: those right before, up to the text before them.

        Args:
            start: Position of the first row.
            count: Rows.
            row: Number of the first row in the step.
        """
        starts = [int(places[0]) for places in self._places]
        stops = [*starts[1:], start + count]
        first = 0
        for item, (begin, stop) in enumerate(zip(starts, stops, strict=True)):
            if item and starts[item - 1] + 1 != begin:
                first = item
            low, high = max(begin, start), min(max(stop, begin), start + count)
            if low < high:
                yield CrossRows(row + low - start, high - low, self.keys[first : item + 1])

    def rows(self, piece: Slice, row: int) -> Iterator[VectorRows]:
        """Return the embeddings that a slice reads; its first row is `row`."""
        for key, places in zip(self.keys, self._places, strict=True):
            first, stop = np.searchsorted(places, (piece.start, piece.stop))
            chosen = places[first:stop]
            breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
            for part in np.split(np.arange(first, stop), breaks):
                if len(part):
                    start = row + int(places[part[0]]) - piece.start
                    yield VectorRows(key, start, int(part[0]), len(part))


def _runs(places: IntArray) -> Iterator[tuple[int, int]]:
    """Group adjacent positions as (first, stop)."""
    for part in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
        if len(part):
            yield int(part[0]), int(part[-1]) + 1


def row_ends(batch: Batch, prompts: Sequence[MediaPrompt | None]) -> IntArray | None:
    """Return `ForwardBatch.row_ends` of a step; None if no row attends to later tokens."""
    plain = True
    parts: list[IntArray] = []
    for piece, prompt in zip(batch.slices, prompts, strict=True):
        if prompt is not None and piece.start < prompt.run_stop:
            parts.append(prompt.ends(piece))
            plain = False
        else:
            parts.append(np.zeros(num_rows(piece), np.int32))
    return None if plain else np.concatenate(parts)


def num_rows(piece: Slice) -> int:
    """Return the rows of a slice, including drafts."""
    return piece.stop - piece.start + (len(piece.draft.tokens) if piece.draft else 0)


def row_positions(batch: Batch, prompts: Sequence[MediaPrompt | None]) -> RowPositions | None:
    """Return positions of all rows; None if each is its index plus its request's shift.

    Args:
        batch: The batch of the step.
        prompts: Prompt of each slice; None: text only.
    """
    special = [
        prompt is not None and prompt.positions is not None and piece.start < prompt.positions.last
        for piece, prompt in zip(batch.slices, prompts, strict=True)
    ]
    if not any(special):
        return None
    parts: list[IntArray] = []
    for piece, prompt in zip(batch.slices, prompts, strict=True):
        stop = piece.start + num_rows(piece)
        index = np.arange(piece.start, stop, dtype=np.int32)
        found = None if prompt is None else prompt.positions
        axes = np.repeat(index[None] + (found.shift if found else 0), 3, 0)
        if found is not None:
            known = found.axes[:, piece.start : stop]
            axes[:, : known.shape[1]] = known
        parts.append(axes)
    axes = np.concatenate(parts, 1, dtype=np.int32)
    rows = np.flatnonzero((axes[0] != axes[1]) | (axes[0] != axes[2])).astype(np.int32)
    return RowPositions(positions=axes[0].copy(), rows=rows, axes=axes[:, rows])
