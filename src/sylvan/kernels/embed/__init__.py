"""Rows of the embedding table, into the float32 residual stream."""

from __future__ import annotations

from sylvan.kernels.api import LinearWeight, TracedTensor, X
from sylvan.kernels.embed import reference
from sylvan.kernels.gpu.choice import KernelDispatch

_embedding = KernelDispatch("embed.embedding", reference.embedding)


def embedding(
    ids: X, weight: LinearWeight, scale: float = 1.0, *, part_from: int | None = None
) -> X:
    """Row `ids[t]` of `weight` (V, D) times `scale`. Shape: (T, D) float32.

    With tied weights the head is the table: a quantised head gives dequantised rows. When traced,
    an id beyond the table reads its last row. With `part_from` the weight is a slice of a table,
    starting at that row: ids outside of the slice give zeros.
    """
    if isinstance(ids, TracedTensor):
        return ids.tracer.embedding(ids, weight, scale, part_from)
    if part_from is not None:
        return reference.part_embedding(ids, weight, scale, part_from)
    return _embedding.on(ids)(ids, weight, scale)
