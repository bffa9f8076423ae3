"""Page tables on the device, with a mirror on the host for lookups by slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.platform.api import Platform


class DevicePageTable:
    """Uploads only changes, because a row of a long request is as long as its context.

    Shapes: G KV groups, S request slots, P pages of a request.
    """

    def __init__(self, platform: Platform, mirror_GSP: IntArray, tables_GSP: torch.Tensor) -> None:
        self._platform = platform
        self._mirror = mirror_GSP
        self._flat = tables_GSP.view(-1)

    def write(self, changes: IntArray) -> Callable[[], None] | None:
        """Update the host mirror; return the work that updates the device, if any.

        `changes` as in `StepPlan.pages`.
        """
        if not changes.size:
            return None
        groups, slots, entries, pages = changes
        self._mirror[groups, slots, entries] = pages
        _, num_slots, width = self._mirror.shape
        where = (groups.astype(np.int64) * num_slots + slots) * width + entries
        # A separate buffer: otherwise every host copy would reserve space for long prompts.
        both = self._platform.pinned(2 * len(where), torch.int64)
        both.numpy()[:] = np.concatenate([where, pages])
        flat = self._flat

        def upload() -> None:
            index, value = both.to(flat.device, non_blocking=True).chunk(2)
            flat.index_copy_(0, index, value.to(flat.dtype))

        return upload
