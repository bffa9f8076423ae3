"""Routing on GPUs: scores, groups, selection and weights of a step's rows in one launch.

A program holds the experts of a row, padded group by group. It selects by 64-bit keys that combine
a score with the expert's position. Keys are distinct, so the K-th largest key separates the K
selected experts. Ties go to the lowest expert, as on a CPU; NaN ranks last. So all ids are valid
and distinct within a row, even if padding rows of a captured graph hold garbage.

Shapes: T rows, E experts, K experts of a row, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import Routing
from sylvan.kernels.experts import routing as reference
from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.gpu.triton_early import inputs_ready

_NO_KEY = tl.constexpr(-(1 << 63))  # below the key of any number
_ELEMENTS = 64  # smallest block of a program


@triton.jit
def _keys(x, place, PLACES: tl.constexpr):
    """Distinct integer keys that sort as x; of equal x the first is largest. Shape: that of x."""
    x = tl.where(x >= float("-inf"), x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 becomes 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (PLACES - 1 - place)


@triton.jit
def _numbers(keys):
    """Recover x from `_keys`."""
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bound(keys, COUNT: tl.constexpr):
    """The COUNT-th largest of each row of keys."""
    bound = tl.max(keys, 1)
    for _ in range(COUNT - 1):
        bound = tl.max(tl.where(keys < bound[:, None], keys, _NO_KEY), 1)
    return bound


@triton.jit
def _in_kept_groups(
    keys,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Whether each expert's group is kept. Shape: that of keys."""
    grouped = tl.reshape(keys, [ROWS, GROUP_BLOCK, SIZE_BLOCK])
    best = tl.max(grouped, 2)
    value = _numbers(best)
    if BEST_TWO:
        others = tl.where(grouped < best[:, :, None], grouped, _NO_KEY)
        value += _numbers(tl.max(others, 2))
    group = tl.arange(0, GROUP_BLOCK)[None, :]
    group_keys = tl.where(group < GROUPS, _keys(value, group, GROUP_BLOCK), _NO_KEY)
    kept = (group_keys >= _bound(group_keys, KEPT)[:, None]).to(tl.int32)
    spread = tl.broadcast_to(kept[:, :, None], [ROWS, GROUP_BLOCK, SIZE_BLOCK])
    return tl.reshape(spread, [ROWS, GROUP_BLOCK * SIZE_BLOCK]) > 0


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    rows,
    row_stride,
    scale,
    SCORES: tl.constexpr,
    BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Experts of ROWS rows, ascending, and their weights; SIZE experts per group."""
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    there = (place // SIZE_BLOCK < GROUPS) & (place % SIZE_BLOCK < SIZE)
    expert = place // SIZE_BLOCK * SIZE + place % SIZE_BLOCK
    real = (row < rows)[:, None] & there[None, :]
    at = row[:, None] * row_stride + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=real, other=float("-inf")).to(tl.float32)
    if SCORES == "softmax":
        grown = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = grown / tl.sum(grown, 1)[:, None]
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        tl.static_assert(SCORES == "softmax_chosen")
        scores = logits
    ranks = scores
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
        ranks = scores + bias[None, :]
    PLACES: tl.constexpr = GROUP_BLOCK * SIZE_BLOCK
    keys = tl.where(there[None, :], _keys(ranks, place[None, :], PLACES), _NO_KEY)
    if GROUPS > 1:
        kept = _in_kept_groups(keys, GROUPS, KEPT, BEST_TWO, ROWS, GROUP_BLOCK, SIZE_BLOCK)
        ranks = tl.where(kept, ranks, float("-inf"))
        keys = tl.where(there[None, :], _keys(ranks, place[None, :], PLACES), _NO_KEY)
    chosen = keys >= _bound(keys, TOP_K)[:, None]
    if SCORES == "softmax_chosen":
        top = tl.max(tl.where(chosen, logits, float("-inf")), 1)
        shares = tl.where(chosen, tl.exp(logits - top[:, None]), 0.0)
        shares = shares / tl.sum(shares, 1)[:, None]
    else:
        shares = tl.where(chosen, scores, 0.0)
        if NORMALISE:
            shares = shares / (tl.sum(shares, 1)[:, None] + 1e-20)
    k = tl.cumsum(chosen.to(tl.int32), 1) - 1
    out = row[:, None] * TOP_K + k
    tl.store(ids_ptr + out, expert[None, :], mask=chosen & real)
    tl.store(weights_ptr + out, shares * scale, mask=chosen & real)


def route(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids are int32. SparseMixer is left to PyTorch."""
    if routing.scores == "sparsemixer":
        return reference.route(logits_TE, routing)
    rows, experts = logits_TE.shape
    plain = routing.scores == "softmax_chosen"  # without groups and bias
    groups = 1 if plain else routing.groups
    bias = None if plain else routing.bias
    size = experts // groups
    group_block, size_block = power_of_two(groups), power_of_two(size)
    block = max(1, _ELEMENTS // (group_block * size_block))
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    ids_TK = logits_TE.new_empty(rows, routing.top_k, dtype=torch.int32)
    weights_TK = logits_TE.new_empty(rows, routing.top_k, dtype=torch.float32)
    launch_early(
        _route_kernel,
        (ceil_div(rows, block),),
        logits_TE,
        logits_TE if bias is None else bias,
        ids_TK,
        weights_TK,
        rows,
        logits_TE.stride(0),
        routing.scale,
        SCORES=routing.scores,
        BIAS=bias is not None,
        NORMALISE=routing.normalise,
        TOP_K=routing.top_k,
        GROUPS=groups,
        KEPT=routing.kept_groups,
        BEST_TWO=routing.group_rank == "best_two",
        SIZE=size,
        ROWS=block,
        GROUP_BLOCK=group_block,
        SIZE_BLOCK=size_block,
        num_warps=1,  # one warp needs no barrier to find a row's best
    )
    return ids_TK, weights_TK
