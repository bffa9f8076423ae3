"""The interface of attention backends, gathered where a backend's author looks for it.

The definitions live in lower packages, because a batch names its backend and a layer its spec.
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
    """The first token that a query at `position` sees; pages before its page are not to be read."""
    return 0 if layer.window is None else max(0, position - layer.window + 1)


def ends_of(
    batch: ForwardBatch, layer: AttentionLayer, rows: slice, first: int
) -> torch.Tensor | None:
    """`ForwardBatch.row_ends` of some rows, counted from token `first` of their request."""
    ends_T = batch.ends(layer)
    return None if ends_T is None else ends_T[rows] - first
