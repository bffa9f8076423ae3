"""The first pass of sampling on GPUs: maxima and sums of every part and block of a row.

A row is divided into parts, one program each, and a part into blocks of a few ids, one cache line
each. A weight is exp((logit - largest of the row) / temperature). Weights are at most 1 and their
bits sort like integers, so levels are searched as integers.

Shapes: R rows, P parts of a row, B blocks of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL = tl.constexpr(1 << 30)
ONE = tl.constexpr(0x3F800000)  # bits of 1.0, the largest weight
_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def clean(x):
    """Clean logits: NaN becomes -inf, +inf the largest number; -inf (forbidden) stays."""
    x = tl.where(x >= float("-inf"), x, float("-inf"))
    return tl.where(x > _MAX, _MAX, x)


@triton.jit
def scale_of(temperature):
    """Factor of logit differences; weights are computed as powers of two."""
    return tl.minimum(1.4426950408889634 / temperature, _MAX)


@triton.jit
def weigh(x, top, scale):
    """Weights of logits."""
    return tl.exp2((clean(x) - top) * scale)


@triton.jit
def bits_of(w):
    """Weights as integers that sort alike."""
    return w.to(tl.int32, bitcast=True)


@triton.jit
def weight_of(bits):
    """The weight of such an integer; 0 for negative ones."""
    return tl.cast(tl.maximum(bits, 0), tl.float32, bitcast=True)


@triton.jit
def parts_kernel(
    logits_ptr,
    temperature_ptr,
    peak_ptr,
    id_ptr,
    sum_ptr,
    block_peak_ptr,
    block_sum_ptr,
    vocab,
    stride,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per part (R, P): largest logit, its first id, and sum of exp((x - largest) / temperature).

    Per block (R, P * B): largest logit, and that sum relative to the largest logit of the part.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits_ptr + row * stride + i, mask=i < vocab, other=float("-inf"))
    x = clean(x)
    peaks = tl.max(x, 1)
    peak = tl.max(peaks, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    sums = tl.sum(weigh(x, level, scale_of(tl.load(temperature_ptr + row))), 1)
    at = row * PARTS + part
    tl.store(peak_ptr + at, peak)
    tl.store(id_ptr + at, tl.min(tl.min(tl.where(x == peak, i, ALL), 1), 0))
    tl.store(sum_ptr + at, tl.sum(sums, 0))
    at = row * (PARTS * BLOCKS) + block
    tl.store(block_peak_ptr + at, peaks)
    tl.store(block_sum_ptr + at, sums)


@triton.jit
def whole(peak_ptr, sum_ptr, row, scale, PARTS: tl.constexpr, PART_BLOCK: tl.constexpr):
    """The largest logit of a row, and the mass of each part, double (PART_BLOCK,)."""
    part = tl.arange(0, PART_BLOCK)
    at, there = row * PARTS + part, part < PARTS
    peaks = tl.load(peak_ptr + at, mask=there, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=there, other=0.0)
    top = tl.max(peaks, 0)
    masses = tl.where(sums > 0.0, sums * tl.exp2((peaks - top) * scale), 0.0)
    return top, masses.to(tl.float64)


@triton.jit
def filter_of(row, vocab, top_k_ptr, top_p_ptr, min_p_ptr):
    """A row's top-k (`ALL` if it keeps all), top-p, min-p, and whether any of them filters."""
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
    k = tl.where(top_k < vocab, top_k, ALL)
    return k, top_p, min_p, (k < ALL) | (top_p < 1.0) | (min_p > 0.0)
