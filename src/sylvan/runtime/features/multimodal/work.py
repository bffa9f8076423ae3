"""Messages between the halves."""

from __future__ import annotations

import msgspec
import numpy as np

from sylvan.protocol.media import MediaKind


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Encode an item, and store its embeddings under `key`.

    `count` is the required number of embeddings; 0: any.
    """

    key: bytes
    kind: MediaKind
    count: int
    features: dict[str, np.ndarray]


class VectorRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row, row + count) of the step are embeddings [first, first + count) of an item."""

    key: bytes
    row: int
    first: int
    count: int


class CrossRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row, row + count) of the step attend to the vectors of these items."""

    row: int
    count: int
    keys: tuple[bytes, ...]


class AlignedRows(msgspec.Struct, frozen=True, array_like=True):
    """Slice `index`, from row `row` on, is part of a prompt to align with its audio.

    Attributes:
        index: Index of the slice.
        row: Its first row.
        most: See `GenerateRequest.align`.
        first: Whether the prompt begins with it.
        done: Whether the prompt ends with it.
    """

    index: int
    row: int
    most: int
    first: bool
    done: bool


class RowPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of a step with parts of multimodal prompts.

    Attributes:
        positions: (T,) int32; unused for rows in `rows`.
        rows: Rows with different axes, (K,) int32.
        axes: Their positions along time, height and width, (3, K) int32.
    """

    positions: np.ndarray
    rows: np.ndarray
    axes: np.ndarray


class MediaWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work for the worker half in a step, in this order; `ends`: `ForwardBatch.row_ends`."""

    drop: tuple[bytes, ...] = ()
    encode: tuple[EncodeJob, ...] = ()
    rows: tuple[VectorRows, ...] = ()
    positions: RowPositions | None = None
    ends: np.ndarray | None = None
    cross: tuple[CrossRows, ...] = ()
    aligned: tuple[AlignedRows, ...] = ()


class MediaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs done since the last report, with the cached bytes; and errors of failed jobs.

    `weights` are what aligned prompts attend to, by slice: see `GenerateRequest.align`.
    """

    encoded: dict[bytes, int] = {}
    failed: dict[bytes, str] = {}
    weights: dict[int, np.ndarray] = {}
