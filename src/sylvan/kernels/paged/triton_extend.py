"""Prefill attention over pages, cached prefix included; requests of any lengths in one launch.

FlashAttention-2 (arXiv:2307.08691) over pages. A tile holds a few tokens times the query heads of
one key head, so that short extensions fill it, too. A program derives its request from the tile's
number: a request that starts at row s of the step owns tiles from s / BQ + its index on. These are
enough, and need no plan on the host.

Shapes: T rows, R requests, N query heads, K key/value heads, G = N / K, BQ tokens a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sylvan.kernels.paged.triton_tile import (
    LOG2_E,
    places,
    rows_of,
    softmax_update,
    softmax_update_block,
)

_SEARCH = tl.constexpr(128)


@triton.jit
def request_of(starts_ptr, tile, requests, TOKENS: tl.constexpr):
    """The last request whose first tile is not after `tile`."""
    found = 0
    for start in range(0, requests, _SEARCH):
        r = start + tl.arange(0, _SEARCH)
        first = tl.load(starts_ptr + r, mask=r < requests, other=0) // TOKENS + r
        found += tl.sum(((r < requests) & (first <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit(do_not_specialize=["requests"])
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_block,
    v_block,
    table_ptr,
    rows_ptr,
    lens_ptr,
    starts_ptr,
    sinks_ptr,
    ends_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    requests,
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
    CAUSAL: tl.constexpr,
    SINKS: tl.constexpr,
    ENDS: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of a tile are TOKENS tokens times HEADS heads of a group, heads fastest.

    With BLOCKS, keys and values that every row sees are copied by descriptors `k_block`, `v_block`.
    """
    # Late tiles of a causal request take longest, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_blocks
    request = request_of(starts_ptr, tile, requests, TOKENS)
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    first_query = (tile - (start // TOKENS + request)) * TOKENS
    if first_query < queries:
        length = tl.load(lens_ptr + request)
        table_ptr += tl.load(rows_ptr + request).to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        query = first_query + row // HEADS
        member = tl.program_id(1) % head_blocks * HEADS + row % HEADS
        real = (query < queries) & (member < GROUP) & (row < TOKENS * HEADS)
        head = kv_head * GROUP + member
        q_place = (start + query).to(tl.int64) * q_stride + head * WIDTH
        q = rows_of(q_ptr, q_place, 1, real, 0, MAIN if WIDTH > MAIN else WIDTH, MAIN, 0)
        q_tail = q
        if TAIL > 0:
            q_tail = rows_of(q_ptr, q_place, 1, real, MAIN, WIDTH - MAIN, TAIL, 0)
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
        caches = (
            k_ptr + kv_head * k_head,
            k_stride,
            v_ptr + kv_head * v_head,
            v_stride,
            k_scale_ptr,
            v_scale_ptr,
            k_step,
            v_step,
        )
        unit = scale
        v_scale = 1.0
        if SCALED == "head":
            unit = scale * tl.load(k_scale_ptr)
            v_scale = tl.load(v_scale_ptr)
        own = length - queries + query  # position of each row's query
        last = own  # token that it sees
        if ENDS:
            row_end = tl.load(ends_ptr + start + query, mask=real, other=0)
            last = tl.maximum(own, row_end - 1)
        lowest = length - queries + first_query
        highest = tl.minimum(lowest + TOKENS, length) - 1
        end = length
        if CAUSAL:
            end = highest + 1
            if ENDS:
                end = tl.minimum(tl.maximum(end, tl.max(row_end, 0)), length)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK
            clear = begin
        elif SEGMENT > 0:
            begin = lowest // SEGMENT * SEGMENT // BLOCK * BLOCK
            clear = begin
        elif SHARED:  # one loop only: the values need the registers of a second one
            clear = begin
        elif CAUSAL:
            clear = (lowest + 1) // BLOCK * BLOCK
        else:
            clear = length // BLOCK * BLOCK
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
        slope = 0.0
        if SLOPED:
            slope = tl.load(slopes_ptr + head, mask=real, other=0.0)
        # ---- tokens visible to all queries of the tile: no mask
        if BLOCKS:
            for at in range(begin, clear, BLOCK):
                slot = tl.load(table_ptr + at // PAGE) * PAGE + at % PAGE
                peak, total, acc = softmax_update_block(
                    (peak, total, acc),
                    q,
                    k_block,
                    v_block,
                    slot,
                    kv_head,
                    (unit, cap, 0.0),
                    WIDTH,
                    VALUE,
                    CAPPED,
                )
        elif not SHARED:
            for at in range(begin, clear, BLOCK):
                token = at + tl.arange(0, BLOCK)
                all_of_them = token >= 0
                bias = 0.0
                if SLOPED:
                    bias = slope[:, None] * (token[None, :] - own[:, None])
                place = places(table_ptr, at, token, all_of_them, PAGE, BLOCK)
                peak, total, acc = softmax_update(
                    (peak, total, acc),
                    q,
                    q_tail,
                    caches,
                    place,
                    all_of_them,
                    all_of_them[None, :],
                    (unit, cap, bias),
                    WIDTH,
                    VALUE,
                    MAIN,
                    TAIL,
                    VALUE_BLOCK,
                    SHARED,
                    CAPPED,
                    MASKED=False,
                    SLOPED=SLOPED,
                    SCALED=SCALED,
                    PAIRS=PAIRS,
                )
        # ---- the diagonal, the window's edges and the last block
        for at in range(clear, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            valid = token < length
            seen = valid[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= last[:, None])
            if WINDOW > 0:
                seen = seen & (token[None, :] > own[:, None] - WINDOW)
                # pages before the window may belong to other requests
                valid = valid & (token > lowest - WINDOW)
            if SEGMENT > 0:
                seen = seen & (token[None, :] >= (own // SEGMENT * SEGMENT)[:, None])
                valid = valid & (token >= lowest // SEGMENT * SEGMENT)
            bias = 0.0
            if SLOPED:
                bias = slope[:, None] * (token[None, :] - own[:, None])
            place = places(table_ptr, at, token, valid, PAGE, BLOCK)
            peak, total, acc = softmax_update(
                (peak, total, acc),
                q,
                q_tail,
                caches,
                place,
                valid,
                seen,
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
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            level = tl.maximum(peak, sink)
            shrink = tl.exp2(peak - level)
            total = total * shrink + tl.exp2(sink - level)
            acc = acc * shrink[:, None]
        mean = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        col = tl.arange(0, VALUE_BLOCK)
        out_ptr += (start + first_query).to(tl.int64) * (KV_HEADS * GROUP * VALUE)
        out = (row // HEADS * (KV_HEADS * GROUP) + head) * VALUE  # within the tile: 32 bits suffice
        mask = real[:, None] & (col < VALUE)[None, :]
        tl.store(
            out_ptr + (out[:, None] + col[None, :]), mean.to(out_ptr.dtype.element_ty), mask=mask
        )
