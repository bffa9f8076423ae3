"""What crosses between the server and a process that prepares items."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sylvan.protocol.media import MediaKind

MAX_FRAME_BYTES = 2 << 30


class Prepare(msgspec.Struct, frozen=True, kw_only=True):
    """Decode an item and make the inputs of the encoder of it."""

    id: int
    kind: MediaKind
    data: bytes
    max_pixels: int
    options: dict[str, Any] = {}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """An item, prepared; or why it cannot be.

    Attributes:
        id: Of the order.
        tokens: Of the prompt, in place of the one placeholder.
        features: Inputs of the encoder, by name.
        grid: See `MediaItem.grid`.
        digest: Of the features.
        error: Why not; empty: it was.
    """

    id: int
    tokens: tuple[int, ...] = ()
    features: dict[str, np.ndarray] = {}
    grid: tuple[int, int, int] | None = None
    digest: bytes = b""
    error: str = ""
