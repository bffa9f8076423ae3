"""The first pass of sampling on GPUs: what every part and every block of a row amounts to.

A row is cut into parts, a program each, and a part into blocks of a few ids that lie in one line of
memory. A weight is exp((logit - largest of the row) / temperature): at most 1, and its bits rise
with it, so that levels are found as integers.

Shapes: R rows, P parts of a row, B blocks of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL = tl.constexpr(1 << 30)
ONE = tl.constexpr(0x3F800000)  # bits of 1.0, the largest weight
_MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def clean(x):
    """NaN can never win, and infinity is the largest number; minus infinity forbids and stays."""
    x = tl.where(x >= float("-inf"), x, float("-inf"))
    return tl.where(x > _MOST, _MOST, x)


@triton.jit
def scale_of(temperature):
    """What differences of logits are multiplied by: weights are powers of two."""
    return tl.minimum(1.4426950408889634 / temperature, _MOST)


@triton.jit
def weigh(x, top, scale):
    """Weights of logits."""
    return tl.exp2((clean(x) - top) * scale)


@triton.jit
def bits_of(w):
    """Weights as integers of the same order."""
    return w.to(tl.int32, bitcast=True)


@triton.jit
def weight_of(bits):
    """The weight of such an integer; nothing for a negative one."""
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
    """Of a part (R, P): largest logit, its first id, and sum of exp((x - largest) / temperature).

    Of its blocks (R, P * B): largest logit, and that sum, less the same largest of the part.
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
    """A row's top-k, `ALL` if it keeps all; top-p; min-p; and whether there is any filter."""
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
    k = tl.where(top_k < vocab, top_k, ALL)
    return k, top_p, min_p, (k < ALL) | (top_p < 1.0) | (min_p > 0.0)
