"""Finds the exact level of a row, and draws an id: the last part of sampling, by one program.

Results equal those of `sylvan.runtime.sampling.draw`; `triton_narrow` defines and brackets levels.
A pass of the search divides the bracket by eight pivots and moves its ends to the nearest weights,
so the search ends a pass or two after only one weight is left.

Shapes: N masses of parts, blocks or ids, in id order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sylvan.kernels.sample.triton_narrow import cut, pivots_of
from sylvan.kernels.sample.triton_parts import ALL, ONE, bits_of, weigh, weight_of

_PIVOTS = tl.constexpr(8)


@triton.jit
def level_among(w, bits, low, high, k, wanted, over, over_mass):
    """Search the bits of the level among these weights; counts above the bracket are added."""
    index = tl.arange(0, _PIVOTS)
    while low < high:
        pivots = pivots_of(low, high, index, _PIVOTS)
        above = bits[None, :] > pivots[:, None]
        counts = over + tl.sum(above.to(tl.int32), 1)
        masses = over_mass + tl.sum(tl.where(above, w[None, :], 0.0), 1).to(tl.float64)
        nearest_low = tl.min(tl.where(bits >= low, bits, ONE), 0)
        nearest_high = tl.max(tl.where(bits <= high, bits, 0), 0)
        enough = (counts >= k) | (masses >= wanted)
        low, high = cut(low, high, pivots, enough, nearest_low, nearest_high)
    return low


@triton.jit
def level_in_row(row_ptr, vocab, top, scale, low, high, k, wanted, CHUNK: tl.constexpr):
    """Search a whole row by one program, for rows that were not narrowed."""
    index = tl.arange(0, _PIVOTS)
    while low < high:
        pivots = pivots_of(low, high, index, _PIVOTS)
        counts = tl.zeros([_PIVOTS, CHUNK], tl.int32)
        masses = tl.zeros([_PIVOTS, CHUNK], tl.float32)
        lows = tl.full([CHUNK], ONE, tl.int32)
        highs = tl.zeros([CHUNK], tl.int32)
        for start in range(0, vocab, CHUNK):
            i = start + tl.arange(0, CHUNK)
            x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf"))
            w = weigh(x, top, scale)
            bits = bits_of(w)
            above = bits[None, :] > pivots[:, None]
            counts += above.to(tl.int32)
            masses += tl.where(above, w[None, :], 0.0)
            lows = tl.minimum(lows, tl.where(bits >= low, bits, ONE))
            highs = tl.maximum(highs, tl.where(bits <= high, bits, 0))
        enough = (tl.sum(counts, 1) >= k) | (tl.sum(masses, 1).to(tl.float64) >= wanted)
        low, high = cut(low, high, pivots, enough, tl.min(lows, 0), tl.max(highs, 0))
    return low


@triton.jit
def parts_at(
    row_ptr,
    vocab,
    top,
    scale,
    level,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Mass and count above a level, and count at it, per part of a row; by one program."""
    part = tl.arange(0, PART_BLOCK)
    masses = tl.zeros([PART_BLOCK], tl.float64)
    counts = tl.zeros([PART_BLOCK], tl.int32)
    tied = tl.zeros([PART_BLOCK], tl.int32)
    for p in range(PARTS):
        i = p * PART + tl.arange(0, PART)
        w = weigh(tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")), top, scale)
        bits = bits_of(w)
        mass = tl.sum(tl.where(bits > level, w, 0.0), 0).to(tl.float64)
        masses = tl.where(part == p, mass, masses)
        counts = tl.where(part == p, tl.sum((bits > level).to(tl.int32), 0), counts)
        tied = tl.where(part == p, tl.sum((bits == level).to(tl.int32), 0), tied)
    return masses, counts, tied


@triton.jit
def ties_of(level, k, wanted, above, mass, at):
    """Number of the `at` ids at the level that are kept, if `above` of this mass lie above it.

    Bounds are double, as in the definition, because equal weights often reach them exactly.
    """
    fit = tl.ceil((wanted - mass) / tl.maximum(weight_of(level), 1e-37).to(tl.float64))
    fit = tl.minimum(tl.maximum(fit, 1.0), at.to(tl.float64)).to(tl.int32)
    return tl.minimum(tl.maximum(k - above, 1), fit)


@triton.jit
def share_of_first(level, k, top_p, above, mass, at):
    """The wanted mass, as top-p's share of the first k ids, which end at this level."""
    ties = tl.minimum(k - above, at).to(tl.float64)
    return top_p.to(tl.float64) * (mass + ties * weight_of(level).to(tl.float64))


@triton.jit
def kept(above, tied, level, ties):
    """Masses (N,) that may be drawn: those above the level, and the first few at it."""
    seen = tl.cumsum(tied, 0) - tied
    mine = tl.minimum(tl.maximum(ties - seen, 0), tied)
    return above + mine.to(tl.float64) * weight_of(level).to(tl.float64)


@triton.jit
def choose(masses, index, goal):
    """First index at which the cumulative sum of masses (N,) exceeds `goal`, and the sum before it.

    If rounding keeps the sum below `goal`, the last index with a positive mass.
    """
    there = masses > 0.0
    hit = tl.min(tl.where((tl.cumsum(masses, 0) > goal) & there, index, ALL), 0)
    chosen = tl.where(hit < ALL, hit, tl.max(tl.where(there, index, 0), 0))
    return chosen, tl.sum(tl.where(index < chosen, masses, 0.0), 0)


@triton.jit
def walk(
    row_ptr,
    part,
    vocab,
    top,
    scale,
    level,
    ties,
    goal,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the id of a part at which the cumulative kept weight exceeds `goal`: block, then id.

    `ties`: number of ids at the level that are kept in this part and later ones.
    """
    block, index = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    start = part * (BLOCKS * BLOCK)
    i = start + block[:, None] * BLOCK + index[None, :]
    w = weigh(tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")), top, scale)
    bits = bits_of(w)
    above = tl.sum(tl.where(bits > level, w, 0.0), 1).to(tl.float64)
    tied = tl.sum((bits == level).to(tl.int32), 1)
    chosen, before = choose(kept(above, tied, level, ties), block, goal)
    ties -= tl.sum(tl.where(block < chosen, tied, 0), 0)
    start += chosen * BLOCK
    i = start + index
    w = weigh(tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")), top, scale)
    bits = bits_of(w)
    above = tl.where(bits > level, w, 0.0).to(tl.float64)
    tied = (bits == level).to(tl.int32)
    chosen, _ = choose(kept(above, tied, level, ties), index, goal - before)
    return start + chosen
