"""The last launch of sampling on GPUs: one program per row draws an id and its log probability.

A draw multiplies a number u in [0, 1) by the mass that filters keep, and takes the first id, in id
order, at which the cumulative mass exceeds that. Without filters the mass of every part is known,
so only one part is scanned. In a sparse row only the gathered ids are scanned. In other rows the
level is searched among gathered ids, parts are summed, and one is scanned. If there are too many
gathered ids, or all three filters meet a flat distribution, the program searches the whole row.

Random numbers are Philox4x32-10 (Salmon et al., SC 2011), keyed by (seed, sample, position).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sylvan.kernels.sample.triton_narrow import DENSE, SLOW, SPARSE
from sylvan.kernels.sample.triton_parts import (
    ALL,
    ONE,
    bits_of,
    clean,
    filter_of,
    scale_of,
    weigh,
    whole,
)
from sylvan.kernels.sample.triton_search import (
    choose,
    kept,
    level_among,
    level_in_row,
    parts_at,
    share_of_first,
    ties_of,
    walk,
)


@triton.jit
def _uniform(seed, sample, position):
    """A number in [0, 1) with 53 random bits; see `runtime.sampling.philox`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(seed, low, high, sample.to(tl.uint32), low ^ low)
    a, b = words[0] >> 5, words[1] >> 6
    return (a.to(tl.float64) * 67108864.0 + b.to(tl.float64)) / 9007199254740992.0


@triton.jit
def _by_row(
    row_ptr,
    vocab,
    top,
    scale,
    low,
    high,
    k,
    top_p,
    min_p,
    wanted,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Level and ties of a row; per part the mass above the level and the number of ids at it."""
    if (k < ALL) & (top_p < 1.0) & (min_p > 0.0):
        first = level_in_row(row_ptr, vocab, top, scale, low, high, k, float("inf"), CHUNK)
        masses, counts, tied = parts_at(row_ptr, vocab, top, scale, first, PARTS, PART_BLOCK, PART)
        at, above, mass = tl.sum(tied, 0), tl.sum(counts, 0), tl.sum(masses, 0)
        wanted = share_of_first(first, k, top_p, above, mass, at)
        low, high = tl.maximum(first, tl.cast(min_p, tl.int32, bitcast=True)), ONE
    level = level_in_row(row_ptr, vocab, top, scale, low, high, k, wanted, CHUNK)
    masses, counts, tied = parts_at(row_ptr, vocab, top, scale, level, PARTS, PART_BLOCK, PART)
    at, above, mass = tl.sum(tied, 0), tl.sum(counts, 0), tl.sum(masses, 0)
    return level, ties_of(level, k, wanted, above, mass, at), masses, tied


@triton.jit
def _gathered(
    row_ptr,
    inside_ptr,
    slot_ptr,
    row,
    top,
    scale,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Gathered ids with their parts, weights and bits; -1 if there are none."""
    slot = tl.arange(0, SLOTS)
    part = tl.zeros([SLOTS], tl.int32)
    first = tl.zeros([SLOTS], tl.int32)
    start = 0
    for p in range(PARTS):
        mine = slot >= start
        part = tl.where(mine, p, part)
        first = tl.where(mine, start, first)
        start += tl.load(inside_ptr + row * PARTS + p)
    there = slot < start
    at = (row * PARTS + part) * SLOTS + slot - first
    ids = part * PART + tl.load(slot_ptr + at, mask=there, other=0).to(tl.int32)
    x = tl.load(row_ptr + ids, mask=there, other=float("-inf"))
    w = weigh(x, top, scale)
    return ids, part, w, tl.where(there, bits_of(w), -1)


@triton.jit
def _beyond(w, bits, level, over, over_mass):
    """Count and mass above a level, and count at it, over gathered ids and those above them."""
    above = over + tl.sum((bits > level).to(tl.int32), 0)
    mass = over_mass + tl.sum(tl.where(bits > level, w, 0.0).to(tl.float64), 0)
    return above, mass, tl.sum((bits == level).to(tl.int32), 0)


@triton.jit
def _level(w, bits, low, high, k, top_p, min_p, wanted, over, over_mass):
    """Search level and ties of a row among gathered ids."""
    if (k < ALL) & (top_p < 1.0) & (min_p > 0.0):
        first = level_among(w, bits, low, high, k, float("inf"), over, over_mass)
        above, mass, at = _beyond(w, bits, first, over, over_mass)
        wanted = share_of_first(first, k, top_p, above, mass, at)
        low, high = tl.maximum(first, tl.cast(min_p, tl.int32, bitcast=True)), ONE
    level = level_among(w, bits, low, high, k, wanted, over, over_mass)
    above, mass, at = _beyond(w, bits, level, over, over_mass)
    return level, ties_of(level, k, wanted, above, mass, at)


@triton.jit
def _pick(w, bits, ids, level, ties, u, SLOTS: tl.constexpr):
    """Draw among gathered ids if no id lies above them."""
    slot = tl.arange(0, SLOTS)
    above = tl.where(bits > level, w, 0.0).to(tl.float64)
    masses = kept(above, (bits == level).to(tl.int32), level, ties)
    chosen, _ = choose(masses, slot, u * tl.sum(masses, 0))
    return tl.sum(tl.where(slot == chosen, ids, 0), 0)


@triton.jit
def draw_kernel(
    logits_ptr,
    peak_ptr,
    part_id_ptr,
    sum_ptr,
    greedy_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    mode_ptr,
    level_ptr,
    inside_ptr,
    over_ptr,
    over_mass_ptr,
    slot_ptr,
    id_ptr,
    logprob_ptr,
    logsumexp_ptr,
    vocab,
    stride,
    PASSES: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write ids (-1: none is valid), their log probabilities and the rows' logsumexp; (R,)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    scale = scale_of(temperature)
    top, masses = whole(peak_ptr, sum_ptr, row, scale, PARTS, PART_BLOCK)
    total = tl.sum(masses, 0)
    if top == float("-inf"):
        tl.store(id_ptr + row, -1)
        tl.store(logprob_ptr + row, float("-inf"))
        tl.store(logsumexp_ptr + row, float("-inf"))
    else:
        part = tl.arange(0, PART_BLOCK)
        there, at = part < PARTS, row * PARTS + part
        drawn = -1
        if tl.load(greedy_ptr + row) != 0:
            peaks = tl.load(peak_ptr + at, mask=there, other=float("-inf"))
            firsts = tl.load(part_id_ptr + at, mask=there, other=ALL)
            drawn = tl.min(tl.where(peaks == top, firsts, ALL), 0)
        else:
            position = tl.load(position_ptr + row)
            u = _uniform(tl.load(seed_ptr + row), tl.load(sample_ptr + row), position)
            k, top_p, min_p, filtered = filter_of(row, vocab, top_k_ptr, top_p_ptr, min_p_ptr)
            level, ties = tl.minimum(k, -1), tl.maximum(k, ALL)  # keep all ids
            tied = tl.zeros([PART_BLOCK], tl.int32)
            if filtered:
                mode = tl.load(mode_ptr + row)
                passes = tl.where(mode == DENSE, PASSES, 0)
                level_at = level_ptr + (passes * tl.num_programs(0) + row) * 2
                low, high = tl.load(level_at), tl.load(level_at + 1)
                wanted = tl.where(top_p < 1.0, top_p.to(tl.float64) * total, float("inf"))
                inside = tl.zeros([PART_BLOCK], tl.int32)
                if mode != SLOW:
                    inside = tl.load(inside_ptr + at, mask=there, other=0)
                count = tl.sum(inside, 0)
                if (mode == SLOW) | ((low < high) & (count > SLOTS)):
                    level, ties, masses, tied = _by_row(
                        row_ptr,
                        vocab,
                        top,
                        scale,
                        low,
                        high,
                        k,
                        top_p,
                        min_p,
                        wanted,
                        PARTS,
                        PART_BLOCK,
                        BLOCKS * BLOCK,
                        CHUNK,
                    )
                else:
                    over = tl.sum(tl.load(over_ptr + at, mask=there, other=0), 0)
                    masses = tl.load(over_mass_ptr + at, mask=there, other=0.0).to(tl.float64)
                    mass = tl.sum(masses, 0)
                    if low == high:
                        if (k < ALL) & (top_p < 1.0) & (min_p > 0.0):
                            wanted = share_of_first(low, k, top_p, over, mass, count)
                        level, tied = low, inside
                        ties = ties_of(low, k, wanted, over, mass, count)
                    else:
                        ids, parts, w, bits = _gathered(
                            row_ptr,
                            inside_ptr,
                            slot_ptr,
                            row,
                            top,
                            scale,
                            PARTS,
                            BLOCKS * BLOCK,
                            SLOTS,
                        )
                        level, ties = _level(
                            w, bits, low, high, k, top_p, min_p, wanted, over, mass
                        )
                        if mode == SPARSE:
                            drawn = _pick(w, bits, ids, level, ties, u, SLOTS)
                        else:
                            for p in range(PARTS):
                                mine = parts == p
                                more = tl.sum(tl.where(mine & (bits > level), w, 0.0), 0)
                                at_level = tl.sum((mine & (bits == level)).to(tl.int32), 0)
                                masses += tl.where(part == p, more, 0.0).to(tl.float64)
                                tied = tl.where(part == p, at_level, tied)
            if drawn < 0:
                masses = kept(masses, tied, level, ties)
                chosen, before = choose(masses, part, u * tl.sum(masses, 0))
                ties -= tl.sum(tl.where(part < chosen, tied, 0), 0)
                drawn = walk(
                    row_ptr,
                    chosen,
                    vocab,
                    top,
                    scale,
                    level,
                    ties,
                    u * tl.sum(masses, 0) - before,
                    BLOCKS,
                    BLOCK,
                )
        chosen = clean(tl.load(row_ptr + drawn))
        log_total = tl.log(total.to(tl.float32))
        tl.store(id_ptr + row, drawn)
        tl.store(logprob_ptr + row, (chosen - top) / temperature - log_total)
        tl.store(logsumexp_ptr + row, top / temperature + log_total)
