"""Messages between the server and a process that prepares items."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sylvan.protocol.media import MediaKind

MAX_FRAME_BYTES = 2 << 30


class PrepareItem(msgspec.Struct, frozen=True, kw_only=True):
    """Decode an item and make the inputs of the encoder of it.

    Of a video at most `max_frames` are looked at; videos and sounds are no longer than
    `max_seconds`.
    """

    id: int
    kind: MediaKind
    data: bytes
    max_pixels: int
    max_frames: int = 768
    max_seconds: float = 3600.0
    options: dict[str, Any] = {}


class PreparedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item, prepared; or why it cannot be.

    Attributes:
        id: Of the order.
        placeholder: The token of the prompt that stands for the item.
        tokens: Of the prompt, in place of that one.
        features: Inputs of the encoder, by name.
        around: Tokens before and after the placeholder that are replaced, too, if they are there.
        grid: See `MediaItem.grid`.
        time_step: See `MediaItem.time_step`.
        digest: Of the features.
        error: Why not; empty: it was.
    """

    id: int
    placeholder: int = -1
    tokens: tuple[int, ...] = ()
    features: dict[str, np.ndarray] = {}
    around: tuple[int, int] | None = None
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0
    digest: bytes = b""
    error: str = ""
