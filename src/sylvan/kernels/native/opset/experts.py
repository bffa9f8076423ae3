"""Ops of experts: routing, and rows sorted by expert.

Shapes: T rows of the op, C columns, E experts, K experts of a row, G groups of inputs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from sylvan.kernels.native.opset.ranks import RankMemory
from sylvan.kernels.native.opset.rows import NOT_QUANTISED, QuantisedRows
from sylvan.kernels.native.schema import BufferRef, Op, operands, reads, updates, writes


class Scores(IntEnum):
    """The function that computes routing weights."""

    SOFTMAX = 0
    SOFTMAX_CHOSEN = 1
    SIGMOID = 2
    SPARSEMIXER = 3
    SQRT_SOFTPLUS = 4


@operands
class Route(Op):
    """Selects the experts of each row and their weights; outputs are contiguous.

    `group_rank`: how many of a group's best experts rank it. `by_token`: the experts of each token,
    as numbers; then scores are for weights only.
    """

    logits: Annotated[int, reads("f32", "T, E")]
    bias: Annotated[BufferRef, reads("f32", "E")] = None
    by_token: Annotated[BufferRef, reads("f32", "vocab_rows, K")] = None
    experts: Annotated[int, writes("i32", "T, K")]
    weights: Annotated[int, writes("f32", "T, K")]
    num_experts: int
    top_k: int
    vocab_rows: int = 0
    scores: Scores
    normalise: bool
    groups: int
    kept_groups: int
    group_rank: int
    scale: float
    jitter: float


@operands
class MoeAlign(Op):
    """Orders the pairs of a row and an expert (row K + k) by expert, then by row.

    `load` counts the rows of each expert. `groups`: see `Linear`. With `slots`, this rank has
    `num_experts` experts, from `first_slot` on; each expert has `copies` slots, which rows use in
    turn. Pairs of other ranks come last, with place -1.
    `owners` is the group of ranks of each pair.
    """

    experts: Annotated[int, reads("i32", "T, K")]
    slots: Annotated[BufferRef, reads("i32", "E, copies")] = None
    load: Annotated[int, updates("i64", "E")]
    sorted_pairs: Annotated[int, writes("i32", "T K")]
    pair_places: Annotated[int, writes("i32", "T K")]
    owners: Annotated[BufferRef, writes("i32", "T, K")] = None
    groups: Annotated[int, writes("i32", "1 + 3 groups")]
    num_experts: int
    top_k: int
    copies: int = 1
    first_slot: int = 0


@operands
class GatherRows(Op):
    """Gathers rows of x for the sorted pairs, times the weight of the pair if there are `weights`.

    Rows after the last of `groups` stay unchanged.
    """

    x: Annotated[int, reads("row", "T / K, C")]
    sorted_pairs: Annotated[int, reads("i32", "T")]
    groups: Annotated[BufferRef, reads("i32", "1 + 3 groups")] = None
    out: Annotated[int, writes("row", "T, C")]
    weights: Annotated[BufferRef, reads("f32", "T")] = None
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    top_k: int


@operands
class GatherQuantised(Op):
    """Gathers quantised rows; each row is quantised once, however many experts it visits."""

    qvalues: Annotated[int, reads("u8", "T / K, bytes")]
    scales: Annotated[int, reads("f32", "T / K")]
    sums: Annotated[BufferRef, reads("i32", "T / K, G")] = None
    sorted_pairs: Annotated[int, reads("i32", "T")]
    groups: Annotated[BufferRef, reads("i32", "1 + 3 groups")] = None
    out_qvalues: Annotated[int, writes("u8", "T, bytes")]
    out_scales: Annotated[int, writes("f32", "T")]
    out_sums: Annotated[BufferRef, writes("i32", "T, G")] = None
    bytes: int
    top_k: int
    num_groups: int


@operands
class ExpertSum(Op):
    """Sums the weighted outputs of a row's experts, in order of expert number."""

    x: Annotated[int, reads("row", "T K, C")]
    pair_places: Annotated[int, reads("i32", "T, K")]
    out: Annotated[int, writes("row", "T, C")]
    weights: Annotated[BufferRef, reads("f32", "T, K")] = None
    cols: int
    top_k: int


@operands
class ExpertCombine(Op):
    """`ExpertSum` over the experts of all ranks: each sends the outputs of its pairs to the others.

    The `width` ranks of a group hold columns of the same experts: their results are summed first,
    over a fixed tree. `by_share`: each rank sums a share of the rows, and sends it to the others.
    """

    ranks: RankMemory
    x: Annotated[int, reads("row", "T K, C")]
    pair_places: Annotated[int, reads("i32", "T, K")]
    owners: Annotated[int, reads("i32", "T, K")]
    out: Annotated[int, writes("row", "T, C")]
    weights: Annotated[BufferRef, reads("f32", "T, K")] = None
    cols: int
    top_k: int
    width: int
    by_share: bool = False
