"""The interface of attention backends, in one place for their authors.

The definitions are in lower packages, because `ForwardBatch` refers to its backend.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.runtime.core.forward import AttentionBackend, AttentionCaps, ForwardBatch

__all__ = [
    "AttentionBackend",
    "AttentionCaps",
    "AttentionLayer",
    "ForwardBatch",
    "ends_of",
    "first_seen",
]


def first_seen(layer: AttentionLayer, position: int) -> int:
    """The first token that a query at `position` attends to; earlier pages must not be read."""
    return 0 if layer.window is None else max(0, position - layer.window + 1)


def ends_of(
    batch: ForwardBatch, layer: AttentionLayer, rows: slice, first: int
) -> torch.Tensor | None:
    """Return `ForwardBatch.row_ends` of some rows, relative to token `first` of their request."""
    ends_T = batch.ends(layer)
    return None if ends_T is None else ends_T[rows] - first
