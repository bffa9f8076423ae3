"""The page table on the device, with a mirror on the host that slots are looked up in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.step import PageUpdate
from sylvan.runtime.platform.api import Platform


class PageTable:
    """Only what changed is uploaded: a row of a long request is as long as its context."""

    def __init__(self, platform: Platform, mirror: IntArray, table_SP: torch.Tensor) -> None:
        self._platform = platform
        self._mirror = mirror
        self._flat = table_SP.view(-1)

    def write(self, updates: Sequence[PageUpdate]) -> Callable[[], None] | None:
        """Change the mirror; returns the work that changes the device's, if there is any."""
        if not updates:
            return None
        width = self._mirror.shape[1]
        places: list[np.ndarray] = []
        for update in updates:
            stop = update.start + len(update.pages)
            self._mirror[update.slot, update.start : stop] = update.pages
            first = update.slot * width
            places.append(np.arange(first + update.start, first + stop, dtype=np.int64))
        where, pages = np.concatenate(places), np.concatenate([u.pages for u in updates])
        # Memory of its own: a long prompt's pages would need room in every host copy.
        both = self._platform.pinned(2 * len(where), torch.int64)
        both.numpy()[:] = np.concatenate([where, pages])
        flat = self._flat

        def upload() -> None:
            index, value = both.to(flat.device, non_blocking=True).chunk(2)
            flat.index_copy_(0, index, value.to(flat.dtype))

        return upload
