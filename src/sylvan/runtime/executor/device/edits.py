"""Edits by capabilities in a queued step: copied when it is planned, uploaded when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from sylvan.runtime.core.forward import NO_EDITS, ForwardBatch, RowVectors, StepEdits
from sylvan.runtime.platform.api import Platform

_TYPES: Mapping[np.dtype[Any], torch.dtype] = MappingProxyType(
    {np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32}
)


def pinned_copy(platform: Platform, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Copy float32 or int32 numbers to pinned host memory of the same shape."""
    made = platform.pinned(array.size, _TYPES[array.dtype]).view(array.shape)
    made.numpy()[...] = array
    return made


class StagedEdits:
    """The edits of one step.

    Args:
        platform: The device.
        batch: Has the edits in host fields, which the next step overwrites.

    Attributes:
        on_device: The edits, after `upload`.
        is_plain: Whether there are none: a captured graph may be replayed.
    """

    def __init__(self, platform: Platform, batch: ForwardBatch) -> None:
        self._device = platform.device
        self._vectors = [
            (part.row, part.layer, pinned_copy(platform, part.vectors))
            for part in batch.input_embeds
        ]
        ends = batch.row_ends
        self._ends = None if ends is None else pinned_copy(platform, ends)
        self._cross = batch.cross
        self.on_device = NO_EDITS
        self.is_plain = not (self._vectors or self._cross or self._ends is not None)

    def upload(self) -> None:
        """Copy them to the device; inside `Stream.run`."""
        if self.is_plain:
            return
        self.on_device = StepEdits(
            vectors=tuple(RowVectors(row, layer, self._on(x)) for row, layer, x in self._vectors),
            ends_T=None if self._ends is None else self._on(self._ends),
            cross=self._cross,
        )

    def _on(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device, non_blocking=True)
