"""Collective ops of a group of ranks. All ranks call the same ops in the same order.

Sums are float32 over a fixed tree of the ranks, so every rank gets the same bits whatever the
order of arrival.
"""

from __future__ import annotations

from typing import cast

import torch

from sylvan.kernels.api import Communicator, TracedTensor, Unsupported, X
from sylvan.kernels.collective import reference
from sylvan.kernels.collective.reference import tree_sum

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "tree_sum"]


def all_reduce(
    x: X, ranks: Communicator, bias: torch.Tensor | None = None, *, like: X | None = None
) -> X:
    """The sum of all ranks' x, plus bias once. Shape: (T, N), in the dtype of `like`, or of x."""
    if isinstance(x, TracedTensor):
        return x.tracer.all_reduce(x, ranks, bias, x if like is None else like)
    dtype = x.dtype if like is None else _tensor(like).dtype
    return reference.all_reduce(x, ranks, bias, dtype)


def all_gather(x: X, ranks: Communicator, cols: int) -> X:
    """The columns of all ranks side by side, the first `cols` of them. Shape: (T, cols).

    Ranks may hold fewer columns than the first, which holds `ceil(cols / size)`.
    """
    if isinstance(x, TracedTensor):
        return x.tracer.all_gather(x, ranks, cols)
    return reference.all_gather(x, ranks, cols)


def reduce_scatter(x: X, ranks: Communicator) -> X:
    """This rank's rows of the sum (reduce-scatter). Shape: (size T, N) -> (T, N)."""
    return cast("X", reference.reduce_scatter(_tensor(x), ranks))


def all_to_all(x: X, ranks: Communicator) -> X:
    """Exchange: rows [r T, (r + 1) T) go to rank r and come from rank r. Shape: (size T, N)."""
    return cast("X", reference.all_to_all(_tensor(x), ranks))


def _tensor(x: torch.Tensor | TracedTensor) -> torch.Tensor:
    if isinstance(x, TracedTensor):
        raise Unsupported("collectives of several ranks")
    return x
