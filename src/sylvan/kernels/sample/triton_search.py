"""Which tokens of a row may be drawn, found without sorting.

The order of tokens is by weight falling, then id rising, and what a filter keeps is always a first
part of it: everything above a level, and the first few (by id) of those at it. The level is found
by search over the weights' bits, which rise with the weights: each pass over the row counts above
eight pivots at once, and pulls the ends of the bracket in to the nearest weights, so that a pass
or two after the bracket holds one weight the search is over. About five passes in all.

The definition is that of `sylvan.runtime.sampling.draw`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PIVOTS = tl.constexpr(8)
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0, the largest weight
_MOST = tl.constexpr(3.4028234663852886e38)
ALL = tl.constexpr(1 << 30)


@triton.jit
def clean(x):
    """NaN can never win, and infinity is the largest number; minus infinity forbids and stays."""
    x = tl.where(x >= float("-inf"), x, float("-inf"))
    return tl.where(x > _MOST, _MOST, x)


@triton.jit
def weights_at(row_ptr, start, vocab, top, temperature, BLOCK: tl.constexpr):
    """exp((logit - top) / temperature) of ids from `start` on; 0 beyond the vocabulary."""
    i = start + tl.arange(0, BLOCK)
    x = clean(tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")))
    return tl.exp((x - top) / temperature)


@triton.jit
def level_of(row_ptr, vocab, top, temperature, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least weight above which less than `target` is found: a number of ids, or a mass."""
    low, high = 0, _ONE
    pivot_index = tl.arange(0, _PIVOTS)
    while low < high:
        step = (high - low + _PIVOTS) // (_PIVOTS + 1)
        pivots = tl.minimum(low + step * (pivot_index + 1) - 1, high - 1)
        above = tl.zeros([_PIVOTS, BLOCK], tl.float32)
        nearest_low = tl.full([BLOCK], _ONE, tl.int32)
        nearest_high = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            w = weights_at(row_ptr, start, vocab, top, temperature, BLOCK)
            bits = w.to(tl.int32, bitcast=True)
            amount = w
            if not BY_MASS:
                amount = w * 0.0 + 1.0
            above += tl.where(bits[None, :] > pivots[:, None], amount[None, :], 0.0)
            nearest_low = tl.minimum(nearest_low, tl.where(bits >= low, bits, _ONE))
            nearest_high = tl.maximum(nearest_high, tl.where(bits <= high, bits, 0))
        enough = tl.sum(above, 1).to(tl.float64) >= target  # the level is higher than this pivot
        next_low = tl.max(tl.where(enough, pivots + 1, low), 0)
        next_high = tl.min(tl.where(enough, high, pivots), 0)
        low = tl.maximum(next_low, tl.min(nearest_low, 0))
        high = tl.maximum(tl.minimum(next_high, tl.max(nearest_high, 0)), low)
    return tl.cast(low, tl.float32, bitcast=True)


@triton.jit
def above_and_at(row_ptr, vocab, top, temperature, level, BLOCK: tl.constexpr):
    """Number and mass of ids above `level`, and the number at it."""
    counts = tl.zeros([BLOCK], tl.int32)
    ties = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        w = weights_at(row_ptr, start, vocab, top, temperature, BLOCK)
        counts += (w > level).to(tl.int32)
        ties += (w == level).to(tl.int32)
        mass += tl.where(w > level, w, 0.0)
    return tl.sum(counts, 0), tl.sum(mass, 0).to(tl.float64), tl.sum(ties, 0)


@triton.jit
def first_beyond(row_ptr, vocab, top, temperature, level, ties, target, BLOCK: tl.constexpr):
    """The first id at which the kept weights sum to more than `target`, in the order of ids.

    Kept are ids above `level`, and the first `ties` at it. If rounding keeps the sum from getting
    there it is the last kept one.
    """
    start, found, last, seen = 0, -1, 0, 0
    running = target * 0.0
    while (start < vocab) & (found < 0):
        i = start + tl.arange(0, BLOCK)
        w = weights_at(row_ptr, start, vocab, top, temperature, BLOCK)
        at_level = (w == level).to(tl.int32)
        ties_here = tl.sum(at_level, 0)
        kept = w >= level
        if (ties_here > 0) & (seen + ties_here > ties):
            rank = seen + tl.cumsum(at_level, 0) - at_level
            kept = (w > level) | ((at_level == 1) & (rank < ties))
        mass = tl.where(kept, w, 0.0)
        after = running + tl.sum(mass, 0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, i, 0), 0))
        if after > target:
            sums = running + tl.cumsum(mass, 0).to(tl.float64)
            hit = tl.where((sums > target) & (mass > 0.0), i, ALL)
            first = tl.min(hit, 0)
            # The sum of the block and the sums inside it may differ in the last digit.
            found = tl.where(first == ALL, last, first)
        running = after
        seen += ties_here
        start += BLOCK
    return tl.where(found < 0, last, found)
