"""Messages between the halves."""

from __future__ import annotations

import msgspec
import numpy as np


class FillSlice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a slice's last known block without final KV, except the last token.

    `head` are those before the slice, int32; empty: their KV is final. `fills`: number of positions
    after the slice that this step fills; None: all of them.
    """

    index: int
    head: np.ndarray
    fills: int | None = None


class FillWork(msgspec.Struct, frozen=True, kw_only=True):
    """Slices that are filled in this step."""

    slices: tuple[FillSlice, ...] = ()
