"""What crosses between the halves."""

from __future__ import annotations

import msgspec
import numpy as np

from sylvan.protocol.media import MediaKind


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Encode an item, and keep the vectors under `key`.

    `count` is how many there must be; 0: as many as the encoder makes.
    """

    key: bytes
    kind: MediaKind
    count: int
    features: dict[str, np.ndarray]


class VectorRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row, row + count) of the step are vectors [first, first + count) of an item."""

    key: bytes
    row: int
    first: int
    count: int


class RowPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of a step that computes parts of prompts with media.

    Attributes:
        positions: (T,) int32; those of rows in `rows` do not count.
        rows: Rows whose axes differ, (K,) int32.
        axes: Their positions along time, height and width, (3, K) int32.
    """

    positions: np.ndarray
    rows: np.ndarray
    axes: np.ndarray


class MediaWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker half does in a step, in this order; `ends`: `ForwardBatch.row_ends`.

    `cross` names what each slice attends to beside its text; empty: nothing.
    """

    drop: tuple[bytes, ...] = ()
    encode: tuple[EncodeJob, ...] = ()
    rows: tuple[VectorRows, ...] = ()
    positions: RowPositions | None = None
    ends: np.ndarray | None = None
    cross: tuple[bytes, ...] = ()


class MediaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs are done since the last report, with the bytes kept; and which failed, and why."""

    encoded: dict[bytes, int] = {}
    failed: dict[bytes, str] = {}
