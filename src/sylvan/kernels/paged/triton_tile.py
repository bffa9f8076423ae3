"""Shared by the attention kernels: KV slots of tokens, and one step of online softmax.

A head of H columns is read in two blocks, because block sizes are powers of two: MAIN, the largest
power of two in H, and TAIL, the rest (576 = 512 + 64, 96 = 64 + 32). Scores are in log2 units,
because the hardware computes 2^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NIBBLE_MIDDLE = tl.constexpr(7.5)  # levels are 0 .. 15


@triton.jit
def places(table_ptr, first, token, valid, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """KV slots of the tokens `token` = first + (0 .. BLOCK - 1).

    If pages consist of whole blocks, one page number serves all tokens. int64, because a pool may
    exceed 2^31 elements.
    """
    if PAGE % BLOCK == 0:
        page = tl.load(table_ptr + first // PAGE).to(tl.int64)
        place = page * PAGE + (token % PAGE)
    else:
        page = tl.load(table_ptr + token // PAGE, mask=valid, other=0).to(tl.int64)
        place = page * PAGE + token % PAGE
    return place


@triton.jit
def rows_of(
    ptr,
    place,
    stride,
    valid,
    first,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Columns first .. first + WIDTH - 1 of tokens, a row a token. Shape: (tokens, BLOCK).

    HALF: bytes of a token, each with a column in its low half and one so much farther in the other;
    0: numbers.
    """
    col = tl.arange(0, BLOCK)
    mask = valid[:, None] & (col < WIDTH)[None, :]
    if HALF > 0:
        pair = tl.load(ptr + place[:, None] * stride + (col % HALF)[None, :], mask=mask, other=0)
        level = (pair.to(tl.int32) >> (col // HALF * 4)[None, :]) & 15
        found = level.to(tl.float32) - NIBBLE_MIDDLE
    else:
        found = tl.load(
            ptr + place[:, None] * stride + (first + col)[None, :], mask=mask, other=0.0
        )
    return found


@triton.jit
def columns_of(
    ptr,
    place,
    stride,
    valid,
    first,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Transposed tile, one column per token, as the product needs keys. Shape: (BLOCK, tokens)."""
    col = tl.arange(0, BLOCK)
    mask = valid[None, :] & (col < WIDTH)[:, None]
    if HALF > 0:
        pair = tl.load(ptr + place[None, :] * stride + (col % HALF)[:, None], mask=mask, other=0)
        level = (pair.to(tl.int32) >> (col // HALF * 4)[:, None]) & 15
        found = level.to(tl.float32) - NIBBLE_MIDDLE
    else:
        found = tl.load(
            ptr + place[None, :] * stride + (first + col)[:, None], mask=mask, other=0.0
        )
    return found


@triton.jit
def capped(products, scale, cap):
    """Soft-capped scores in log2 units. Does not overflow: if exp is infinite, 2 / inf is 0."""
    grown = tl.exp2(products * (2.0 * LOG2_E * scale / cap))
    return (1.0 - 2.0 / (grown + 1.0)) * (cap * LOG2_E)


@triton.jit
def softmax_update(
    state,
    q,
    q_tail,
    caches,
    place,
    valid,
    seen,
    numbers,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SLOPED: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One online-softmax update of (peak, total, acc) by a block (arXiv:2205.14135 s3.1).

    `seen` (rows, tokens) is the attention mask; without MASKED, every token is visible. SHARED: the
    values are the first columns of the keys (latent attention), which are then read once. The scale
    must be positive: products are compared before they are scaled. SLOPED: `bias` (rows, tokens) is
    added to the scores. SCALED "token": keys and values have scales, which join the scores and the
    weights. PAIRS: numbers of a byte's worth of columns, 2 of four bits.
    """
    peak, total, acc = state
    k_ptr, k_stride, v_ptr, v_stride, k_scale_ptr, v_scale_ptr, k_step, v_step = caches
    main: tl.constexpr = MAIN if WIDTH > MAIN else WIDTH
    k_half: tl.constexpr = WIDTH // 2 * (PAIRS - 1)
    v_half: tl.constexpr = VALUE // 2 * (PAIRS - 1)
    k = columns_of(k_ptr, place, k_stride, valid, 0, main, MAIN, k_half).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    if TAIL > 0:
        k_tail = columns_of(k_ptr, place, k_stride, valid, MAIN, WIDTH - MAIN, TAIL, 0).to(q.dtype)
        scores = tl.dot(q_tail, k_tail, scores, input_precision="ieee")
    if SCALED == "token":
        scores *= tl.load(k_scale_ptr + place * k_step, mask=valid, other=0.0)[None, :]
    higher, weights, shrink = weighted(peak, scores, seen, numbers, CAPPED, MASKED, SLOPED)
    if SHARED:
        v = tl.trans(k)
    else:
        v = rows_of(v_ptr, place, v_stride, valid, 0, VALUE, VALUE_BLOCK, v_half).to(q.dtype)
    scaled = weights
    if SCALED == "token":
        scaled = weights * tl.load(v_scale_ptr + place * v_step, mask=valid, other=0.0)[None, :]
    acc = tl.dot(scaled.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def weighted(
    peak,
    scores,
    seen,
    numbers,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SLOPED: tl.constexpr,
):
    """Return the new maxima, the block's weights relative to them, and the rescaling factors."""
    scale, cap, bias = numbers
    unit = scale * LOG2_E
    if CAPPED:
        scores = capped(scores, scale, cap)
        unit = 1.0
    if SLOPED:
        scores = scores * unit + bias * LOG2_E
        unit = 1.0
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * unit)
    level = higher
    if MASKED:  # rows without a visible token have the maximum -inf, and -inf - -inf is NaN
        level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(scores * unit - level[:, None]), tl.exp2(peak - level)


@triton.jit
def softmax_update_block(
    state,
    q,
    k_block,
    v_block,
    slot,
    kv_head,
    numbers,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """`softmax_update` for a block of visible tokens in consecutive slots, by descriptors."""
    peak, total, acc = state
    k = k_block.load([slot, kv_head * WIDTH])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    found = weighted(peak, scores, scores, numbers, CAPPED, False, False)
    higher, weights, shrink = found[0], found[1], found[2]
    v = v_block.load([slot, kv_head * VALUE])
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), acc
