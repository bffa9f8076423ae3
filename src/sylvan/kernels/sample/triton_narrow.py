"""Narrows each row to the ids that filters may keep, in parallel, before one program draws.

Sort ids by descending weight, then ascending id: top-k, top-p and min-p always keep a prefix of
that order, namely all ids above a level and the first few ids at it. The level is the smallest
weight above which there are fewer than k ids and less than the wanted mass. These kernels bracket
it:

- `bracket_kernel`, one program per row, reads only the block statistics of the first pass. A block
  with largest weight m and sum s has at least the mass max(m, s - (ids - 1) * L) above any L <= m.
  The sum over blocks is a lower bound of the mass above L, and the number of such blocks a lower
  bound of the ids. The largest L at which either suffices is a lower bound of the level; it is
  tight if few blocks hold two relevant ids. At most (s - m) / L + 1 ids per block are not below it.
  If these are few, the row is sparse.
- `narrow_kernel`, one program per part, narrows the bracket of rows that are not sparse, by counts
  and masses above 16 pivots; each pass starts from the bracket of the last one.
- `gather_kernel`, one program per part, lists the ids in the bracket, ascending, and sums the mass
  above it. It loads only blocks that reach the bracket: a few cache lines of a sparse row.

Shapes: R rows, P parts of a row, J pivots, N passes of `narrow_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sylvan.kernels.sample.triton_parts import (
    ALL,
    ONE,
    bits_of,
    filter_of,
    scale_of,
    weigh,
    weight_of,
    whole,
)

DONE = tl.constexpr(0)  # modes of rows: no filters,
SPARSE = tl.constexpr(1)  # few relevant ids,
DENSE = tl.constexpr(2)  # the bracket must be narrowed,
SLOW = tl.constexpr(3)  # the drawing program searches the whole row
_SHIFT = tl.constexpr(19)  # the bracket's floor has a resolution of 1/16 octave
_SLACK = tl.constexpr(1.0001)  # allows for rounding in block sums


@triton.jit
def _floor(weights, sums, k, wanted, BLOCK: tl.constexpr):
    """Bits of a level at or above which there are at least k ids or the wanted mass."""
    bits = bits_of(weights)
    low, high = 0, ONE >> _SHIFT
    while low < high:
        middle = (low + high + 1) // 2
        least = middle << _SHIFT
        above = bits >= least
        count = tl.sum(above.to(tl.int32), 0)
        rest = tl.maximum(weights, sums - (BLOCK - 1) * weight_of(least))
        mass = tl.sum(tl.where(above, rest, 0.0), 0)
        enough = (count >= k) | (mass.to(tl.float64) >= wanted * _SLACK)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low << _SHIFT


@triton.jit
def bracket_kernel(
    peak_ptr,
    sum_ptr,
    block_peak_ptr,
    block_sum_ptr,
    greedy_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    mode_ptr,
    k_ptr,
    top_ptr,
    wanted_ptr,
    level_ptr,
    vocab,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Mode, k, largest logit, wanted mass (R,), and the first bracket, in `level` (N + 1, R, 2)."""
    row = tl.program_id(0).to(tl.int64)
    scale = scale_of(tl.load(temperature_ptr + row))
    top, masses = whole(peak_ptr, sum_ptr, row, scale, PARTS, PART_BLOCK)
    k, top_p, min_p, filtered = filter_of(row, vocab, top_k_ptr, top_p_ptr, min_p_ptr)
    if (tl.load(greedy_ptr + row) != 0) | (top == float("-inf")) | (filtered == 0):
        tl.store(mode_ptr + row, DONE)
    else:
        # With all three filters, top-p applies to the mass of the k best ids, so these must be
        # found first.
        triple = (k < ALL) & (top_p < 1.0) & (min_p > 0.0)
        share = (top_p < 1.0) & (triple == 0)
        wanted = tl.where(share, top_p.to(tl.float64) * tl.sum(masses, 0), float("inf"))
        block = tl.arange(0, ALL_BLOCKS)
        there = block * BLOCK < vocab
        at = row * (PARTS * BLOCKS) + block
        weights = tl.load(block_peak_ptr + at, mask=there, other=float("-inf"))
        weights = weigh(weights, top, scale)
        sums = tl.load(block_sum_ptr + at, mask=there, other=0.0)
        peaks = tl.load(peak_ptr + row * PARTS + block // BLOCKS, mask=there, other=float("-inf"))
        sums *= weigh(peaks, top, scale)
        low = _floor(weights, sums, k, wanted, BLOCK)
        least = tl.where(triple, 0, tl.cast(min_p, tl.int32, bitcast=True))
        low = tl.maximum(tl.maximum(low, least), 1)  # ids of weight 0 are never drawn
        high = tl.where((k < ALL) | (top_p < 1.0), ONE, low)
        others = (sums - weights) / tl.maximum(weight_of(low), 1e-37) * _SLACK
        most = tl.minimum(tl.maximum(others, 0.0) + 1.0, BLOCK)
        num_candidates = tl.sum(tl.where((bits_of(weights) >= low) & there, most, 0.0), 0)
        sparse = (num_candidates <= SLOTS) | (low == high)
        tl.store(mode_ptr + row, tl.where(sparse, SPARSE, tl.where(triple, SLOW, DENSE)))
        tl.store(k_ptr + row, k)
        tl.store(top_ptr + row, top)
        tl.store(wanted_ptr + row, wanted)
        tl.store(level_ptr + row * 2, low)
        tl.store(level_ptr + row * 2 + 1, high)


@triton.jit
def pivots_of(low, high, index, PIVOTS: tl.constexpr):
    """Levels that divide a bracket into equal pieces; all are below its upper end."""
    step = (high - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + step * (index + 1) - 1, high - 1)


@triton.jit
def cut(low, high, pivots, enough, nearest_low, nearest_high):
    """The bracket after a pass: between two pivots, with its ends moved to the nearest weights."""
    next_low = tl.max(tl.where(enough, pivots + 1, low), 0)
    next_high = tl.min(tl.where(enough, high, pivots), 0)
    low = tl.maximum(next_low, nearest_low)
    return low, tl.maximum(tl.minimum(next_high, nearest_high), low)


@triton.jit
def _bracket_after(
    passes,
    row,
    k,
    wanted,
    level_ptr,
    near_ptr,
    count_ptr,
    mass_ptr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The bracket of a row after `passes` passes of `narrow_kernel`.

    The last pass has left its initial bracket in `level`, the weights of each part that are nearest
    to its ends in `near` (N, R, P, 2), and counts and masses above its pivots (N, R, P, J).
    """
    before = (tl.maximum(passes - 1, 0) * tl.num_programs(0) + row).to(tl.int64)
    low, high = tl.load(level_ptr + before * 2), tl.load(level_ptr + before * 2 + 1)
    if (passes > 0) & (low < high):
        part, index = tl.arange(0, PART_BLOCK), tl.arange(0, PIVOTS)
        there = part < PARTS
        at = before * PARTS + part
        all_at = at[:, None] * PIVOTS + index[None, :]
        pivots = pivots_of(low, high, index, PIVOTS)
        enough = pivots < low
        if k < ALL:
            counts = tl.load(count_ptr + all_at, mask=there[:, None], other=0)
            enough |= tl.sum(counts, 0) >= k
        if wanted < float("inf"):
            masses = tl.load(mass_ptr + all_at, mask=there[:, None], other=0.0)
            enough |= tl.sum(masses.to(tl.float64), 0) >= wanted
        nearest_low = tl.min(tl.load(near_ptr + at * 2, mask=there, other=ONE), 0)
        nearest_high = tl.max(tl.load(near_ptr + at * 2 + 1, mask=there, other=0), 0)
        low, high = cut(low, high, pivots, enough, nearest_low, nearest_high)
    return low, high


@triton.jit(do_not_specialize=["passes"])
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    mode_ptr,
    k_ptr,
    top_ptr,
    wanted_ptr,
    level_ptr,
    near_ptr,
    count_ptr,
    mass_ptr,
    vocab,
    stride,
    passes,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """One pass after `passes` earlier ones; see `_bracket_after` for its outputs."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(mode_ptr + row) == DENSE:
        top, scale = tl.load(top_ptr + row), scale_of(tl.load(temperature_ptr + row))
        k, wanted = tl.load(k_ptr + row), tl.load(wanted_ptr + row)
        low, high = _bracket_after(
            passes,
            row,
            k,
            wanted,
            level_ptr,
            near_ptr,
            count_ptr,
            mass_ptr,
            PARTS,
            PART_BLOCK,
            PIVOTS,
        )
        mine = passes * tl.num_programs(0) + row
        if (part == 0) & (passes > 0):
            tl.store(level_ptr + mine * 2, low)
            tl.store(level_ptr + mine * 2 + 1, high)
        if low < high:
            i = part * PART + tl.arange(0, PART)
            x = tl.load(logits_ptr + row * stride + i, mask=i < vocab, other=float("-inf"))
            w = weigh(x, top, scale)
            bits = bits_of(w)
            at = mine * PARTS + part
            tl.store(near_ptr + at * 2, tl.min(tl.where(bits >= low, bits, ONE), 0))
            tl.store(near_ptr + at * 2 + 1, tl.max(tl.where(bits <= high, bits, 0), 0))
            if k < ALL:
                for index in tl.static_range(PIVOTS):
                    above = bits > pivots_of(low, high, index, PIVOTS)
                    tl.store(count_ptr + at * PIVOTS + index, tl.sum(above.to(tl.int32), 0))
            if wanted < float("inf"):
                for index in tl.static_range(PIVOTS):
                    above = bits > pivots_of(low, high, index, PIVOTS)
                    tl.store(mass_ptr + at * PIVOTS + index, tl.sum(tl.where(above, w, 0.0), 0))


@triton.jit
def gather_kernel(
    logits_ptr,
    temperature_ptr,
    block_peak_ptr,
    mode_ptr,
    k_ptr,
    top_ptr,
    wanted_ptr,
    level_ptr,
    near_ptr,
    count_ptr,
    mass_ptr,
    inside_ptr,
    over_ptr,
    over_mass_ptr,
    slot_ptr,
    vocab,
    stride,
    PASSES: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """For each part (R, P): number of ids in the last bracket, and number and mass above it.

    Unless the bracket is a single weight, the ids in it are written to slots, int16
    (R, P, `SLOTS`), as offsets in the part. The number includes ids that do not fit.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mode = tl.load(mode_ptr + row)
    if (mode == SPARSE) | (mode == DENSE):
        top, scale = tl.load(top_ptr + row), scale_of(tl.load(temperature_ptr + row))
        passes = tl.where(mode == DENSE, PASSES, 0)
        low, high = _bracket_after(
            passes,
            row,
            tl.load(k_ptr + row),
            tl.load(wanted_ptr + row),
            level_ptr,
            near_ptr,
            count_ptr,
            mass_ptr,
            PARTS,
            PART_BLOCK,
            PIVOTS,
        )
        if (part == 0) & (passes > 0):
            mine = passes * tl.num_programs(0) + row
            tl.store(level_ptr + mine * 2, low)
            tl.store(level_ptr + mine * 2 + 1, high)
        block = tl.arange(0, BLOCKS)
        peaks = tl.load(block_peak_ptr + (row * PARTS + part) * BLOCKS + block)
        reach = bits_of(weigh(peaks, top, scale)) >= low
        offset = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        i = part * (BLOCKS * BLOCK) + offset
        there = reach[:, None] & (i < vocab)
        x = tl.load(logits_ptr + row * stride + i, mask=there, other=float("-inf"))
        w = weigh(x, top, scale)
        bits = bits_of(w)
        over = bits > high
        inside = ((bits >= low) & (bits <= high)).to(tl.int32)
        counts = tl.sum(inside, 1)
        at = row * PARTS + part
        tl.store(inside_ptr + at, tl.sum(counts, 0))
        tl.store(over_ptr + at, tl.sum(tl.sum(over.to(tl.int32), 1), 0))
        tl.store(over_mass_ptr + at, tl.sum(tl.sum(tl.where(over, w, 0.0), 1), 0))
        if (low < high) & (tl.sum(counts, 0) > 0):
            first = tl.cumsum(counts, 0) - counts
            place = first[:, None] + tl.cumsum(inside, 1) - inside
            num_candidates = (inside > 0) & (place < SLOTS)
            tl.store(slot_ptr + at * SLOTS + place, offset.to(tl.int16), mask=num_candidates)
