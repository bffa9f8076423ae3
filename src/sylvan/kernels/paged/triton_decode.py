"""Decode attention, one query per request. Split-KV, so that few requests fill a GPU, too.

FlashDecoding (pytorch.org/blog/flash-decoding) over the pages of PagedAttention (arXiv:2309.06180);
a tile holds all query heads of a key head. The split points of a request depend on its own length
only; the number of programs that share the splits depends on the batch. So a row's bits do not
depend on other rows, and a captured graph serves every length.

Shapes: R requests, N query heads, K key/value heads, G = N / K, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.paged.triton_tile import LOG2_E, places, rows_of, softmax_update


@triton.jit
def _span(
    length,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First visible token (rounded down to a block), tokens per split, number of splits."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    if SEGMENT > 0:
        first = tl.maximum(first, (length - 1) // SEGMENT * SEGMENT // BLOCK * BLOCK)
    # Whole blocks, so that only the last split ends inside one.
    blocks = (length - first + SPLITS * BLOCK - 1) // (SPLITS * BLOCK)
    each = tl.maximum(blocks * BLOCK, MIN_SPLIT)
    return first, each, (length - first + each - 1) // each


@triton.jit(do_not_specialize=["lanes"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    part_ptr,
    peak_ptr,
    q_stride,
    k_stride,
    k_head,
    v_stride,
    v_head,
    k_step,
    v_step,
    table_stride,
    scale,
    cap,
    lanes,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    SLOPED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend to every `lanes`-th split; write its weighted mean and the log2 of its weight."""
    inputs_ready(EARLY)
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // head_blocks
    lane = tl.program_id(1)
    request = tl.program_id(2)
    length = tl.load(lens_ptr + request)
    span = _span(length, WINDOW, SEGMENT, SPLITS, MIN_SPLIT, BLOCK)
    first, each, count = span
    if lane < count:
        table_ptr += tl.load(rows_ptr + request).to(tl.int64) * table_stride
        member = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
        in_group = member < GROUP
        head = kv_head * GROUP + member
        q_ptr += request.to(tl.int64) * q_stride
        q = rows_of(q_ptr, head, WIDTH, in_group, 0, MAIN if WIDTH > MAIN else WIDTH, MAIN, 0)
        q_tail = q
        if TAIL > 0:
            q_tail = rows_of(q_ptr, head, WIDTH, in_group, MAIN, WIDTH - MAIN, TAIL, 0)
        k_scale_ptr += kv_head
        caches = (
            k_ptr + kv_head * k_head,
            k_stride,
            v_ptr + kv_head * v_head,
            v_stride,
            k_scale_ptr,
            v_scale_ptr + kv_head,
            k_step,
            v_step,
        )
        unit = scale
        if SCALED == "head":
            unit = scale * tl.load(k_scale_ptr)
        written = request.to(tl.int64) * (KV_HEADS * GROUP * SPLITS)
        part_ptr += written * VALUE
        peak_ptr += written
        col = tl.arange(0, VALUE_BLOCK)
        slope = 0.0
        if SLOPED:
            slope = tl.load(slopes_ptr + head, mask=in_group, other=0.0)
        for split in range(lane, count, lanes):
            begin = first + split * each
            end = tl.minimum(begin + each, length)
            peak = tl.full([HEADS], float("-inf"), tl.float32)
            total = tl.zeros([HEADS], tl.float32)
            acc = tl.zeros([HEADS, VALUE_BLOCK], tl.float32)
            for start in range(begin, end, BLOCK):
                token = start + tl.arange(0, BLOCK)
                valid = token < end
                if WINDOW > 0:
                    valid = valid & (token >= length - WINDOW)
                if SEGMENT > 0:
                    valid = valid & (token >= (length - 1) // SEGMENT * SEGMENT)
                bias = 0.0
                if SLOPED:
                    bias = slope[:, None] * (token - (length - 1))[None, :]
                place = places(table_ptr, start, token, valid, PAGE, BLOCK)
                peak, total, acc = softmax_update(
                    (peak, total, acc),
                    q,
                    q_tail,
                    caches,
                    place,
                    valid,
                    valid[None, :],
                    (unit, cap, bias),
                    WIDTH,
                    VALUE,
                    MAIN,
                    TAIL,
                    VALUE_BLOCK,
                    SHARED,
                    CAPPED,
                    MASKED=True,
                    SLOPED=SLOPED,
                    SCALED=SCALED,
                    PAIRS=PAIRS,
                )
            mean = acc / total[:, None]
            mask = in_group[:, None] & (col < VALUE)[None, :]
            out = (
                head * SPLITS + split
            )  # within the request: 32 bits suffice, with half the registers
            tl.store(part_ptr + (out[:, None] * VALUE + col[None, :]), mean, mask=mask)
            tl.store(peak_ptr + out, peak + tl.log2(total), mask=in_group)


@triton.jit
def merge_kernel(
    part_ptr,
    peak_ptr,
    lens_ptr,
    sinks_ptr,
    v_scale_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine the splits of a head by their weights; a sink has a weight but no value."""
    inputs_ready(EARLY)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    span = _span(tl.load(lens_ptr + request), WINDOW, SEGMENT, SPLITS, MIN_SPLIT, BLOCK)
    count = span[2]
    row = request * NUM_HEADS + head
    split = tl.arange(0, SPLITS)
    peaks = tl.load(peak_ptr + row * SPLITS + split, mask=split < count, other=float("-inf"))
    top = tl.max(peaks, 0)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(peaks - top), 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - top)
    col = tl.arange(0, VALUE_BLOCK)
    inside = col < VALUE
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    for start in range(0, count, CHUNK):
        some = start + tl.arange(0, CHUNK)
        own = tl.load(peak_ptr + row * SPLITS + some, mask=some < count, other=float("-inf"))
        mask = (some < count)[:, None] & inside[None, :]
        means = tl.load(
            part_ptr + (row * SPLITS + some)[:, None] * VALUE + col[None, :], mask=mask, other=0.0
        )
        acc += tl.sum(means * tl.exp2(own - top)[:, None], 0)
    v_scale = 1.0
    if SCALED == "head":
        v_scale = tl.load(v_scale_ptr + head // GROUP)
    # A padding row has seen nothing: zero, not zero by zero.
    mean = acc * (v_scale / tl.where(total == 0.0, 1.0, total))
    tl.store(out_ptr + row * VALUE + col, mean.to(out_ptr.dtype.element_ty), mask=inside)
