"""Messages between the server and a media process."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sylvan.protocol.media import MediaKind

MAX_FRAME_BYTES = 2 << 30


class PrepareItem(msgspec.Struct, frozen=True, kw_only=True):
    """Decode an item, and compute the encoder's inputs.

    At most `max_frames` of a video are sampled; videos and audio are limited to
    `max_seconds`.
    """

    id: int
    kind: MediaKind
    data: bytes
    max_pixels: int
    max_frames: int = 768
    max_seconds: float = 3600.0
    options: dict[str, Any] = {}


class EncodeItem(msgspec.Struct, frozen=True, kw_only=True):
    """Prepare and encode an item; the answer is a `PreparedItem` whose features are the vectors.

    `scope` separates tenants: the cache never serves one tenant's item to another.
    """

    item: PrepareItem
    scope: str = ""


class PreparedItem(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared item, or the error.

    Attributes:
        id: ID of the `PrepareItem`.
        placeholder: Placeholder token of the item in the prompt.
        tokens: Tokens that replace it.
        features: Inputs of the encoder, by name.
        around: Tokens before and after the placeholder that are replaced too, if present.
        grid: See `MediaItem.grid`.
        time_step: See `MediaItem.time_step`.
        digest: Hash of the features.
        error: Error; empty on success.
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
