"""Attention to the keys of near tokens, and to entries that stand for several tokens (DeepSeek V4).

A key is also a value. Entries are weighted sums of the rows of their tokens, which a recurrent
state carries on. Of a layer with an index, rows attend to the entries that score best.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, Unsupported, X
from sylvan.kernels.compressed import reference
from sylvan.kernels.compressed.parts import (
    CompressedHeads,
    EntryIndex,
    EntryInputs,
    EntryPlace,
    TracedEntries,
)

__all__ = [
    "CompressedHeads",
    "CompressedTracer",
    "EntryIndex",
    "EntryInputs",
    "EntryPlace",
    "TracedEntries",
    "compressed_attention",
    "grouped_linear",
]


@runtime_checkable
class CompressedTracer(Protocol):
    """Emits these ops; arguments as in the functions below.

    Raises:
        Unsupported: from any method, when the shapes have no kernel.
    """

    def compressed_attention(
        self, q: TracedTensor, k: TracedTensor, heads: CompressedHeads, far: TracedEntries | None
    ) -> TracedTensor: ...

    def grouped_linear(
        self, x: TracedTensor, weight: LinearWeight, groups: int
    ) -> TracedTensor: ...


def compressed_attention(
    q: TracedTensor, k: TracedTensor, heads: CompressedHeads, far: TracedEntries | None
) -> TracedTensor:
    """Store keys and entries of the rows, and attend. Shape: (T, N H).

    For tracing only: with tensors, the functions of `reference` read the pages.

    Args:
        q: (T, N H), before norm and rotation.
        k: (T, H), before rotation.
        heads: Constants of the layer.
        far: Its entries; None: it has none.
    """
    return _tracer(q).compressed_attention(q, k, heads, far)


def grouped_linear(x: X, weight: LinearWeight, groups: int) -> X:
    """Multiply each of `groups` of columns by its own matrix. Shape: (T, G F) to (T, G R).

    `weight`: (G R, F), never quantised.
    """
    if isinstance(x, TracedTensor):
        return _tracer(x).grouped_linear(x, weight, groups)
    assert isinstance(weight, torch.Tensor)
    return reference.grouped_linear(x, weight, groups)


def _tracer(x: TracedTensor) -> CompressedTracer:
    if not isinstance(x.tracer, CompressedTracer):
        raise Unsupported("compressed attention")
    return x.tracer
