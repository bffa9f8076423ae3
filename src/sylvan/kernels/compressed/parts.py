"""Sizes and rows of compressed attention; see `sylvan.kernels.compressed`.

Shapes: T rows, N heads, H columns of a head, C columns of an entry, J heads of the index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import HeadNorm, LinearWeight, Rope, TracedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedHeads:
    """Heads of a layer, and the keys of near tokens.

    Attributes:
        layer: Number of the layer of the pool that has the keys.
        num_heads: N.
        head_dim: H.
        window: Tokens whose keys a row reads, its own included.
        sinks: (N,), logits that take part in the softmax.
        rope: Rotates the last columns of heads; neighbours are a pair.
        eps: Of the norm of query heads.
    """

    layer: int
    num_heads: int
    head_dim: int
    window: int
    sinks: torch.Tensor
    rope: Rope
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryPlace:
    """Where entries lie: in the last `block` tokens of `rate`, from `column` on.

    `layer`: number of the layer of the pool.
    """

    layer: int
    rate: int
    block: int
    column: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntryInputs:
    """Rows of which entries are sums: their softmax weighs `values` by `logits`.

    Attributes:
        values: Float32, (T, C); with `overlaps` (T, 2 C), the first half for the next entry.
        logits: As `values`.
        bias: (rate, columns of logits), added to the logits of each token of an entry.
        norm: Of entries.
        part: Number of their state.
        width: C.
        overlaps: Whether an entry also reads the tokens of the one before.
    """

    values: TracedTensor
    logits: TracedTensor
    bias: LinearWeight
    norm: HeadNorm
    part: int
    width: int
    overlaps: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntryIndex:
    """By what rows select entries: heads (T, J C) that are not rotated yet, and weights (T, J).

    `keys` are entries of their own, beside those that rows attend to.
    """

    keys: EntryInputs
    q: TracedTensor
    weights: TracedTensor
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedEntries:
    """Entries of a layer; without an `index`, rows attend to all of them."""

    place: EntryPlace
    rows: EntryInputs
    index: EntryIndex | None = None
