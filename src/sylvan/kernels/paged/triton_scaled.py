"""Keys and values in int8 or int4 with a scale for each token and head.

Heads of four bits are rotated by a Hadamard matrix before they are rounded, which spreads large
columns over all (QuaRot, arXiv:2404.00456); queries are rotated alike, and results back.

Shapes: T rows, K key/value heads, H head dim.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.paged.pages import NIBBLES, Cache, token_scales

_ROWS = 16  # of a product of matrix units
_STEP = 32  # columns of the rotation at a time
_ELEMENTS = 2048  # of a program's block
_MIDDLE = tl.constexpr(7.5)  # of levels 0 .. 15
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even


@triton.jit
def _hadamard(row, col):
    """Entries 1 and -1 of the Hadamard matrix of up to 256 rows, by the bits that both have."""
    both = row[:, None] & col[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def _rotated(
    x_ptr,
    row,
    inside,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Heads that begin at `row` times the normal Hadamard matrix. Shape: (ROWS, WIDTH), float32."""
    col = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, WIDTH, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + row[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(x, _hadamard(k, col).to(x.dtype), acc, input_precision="ieee")
    return acc * NORM


@triton.jit
def _rotate_kernel(
    x_ptr,
    out_ptr,
    count,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    inputs_ready(EARLY)
    head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = head < count
    x = _rotated(x_ptr, head * WIDTH, inside, NORM, WIDTH, ROWS, STEP)
    at = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _store_kernel(
    x_ptr,
    cache_ptr,
    scale_ptr,
    slot_ptr,
    x_stride,
    x_head,
    cache_stride,
    cache_head,
    scale_stride,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    FOUR: tl.constexpr,
    NORM: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (t, i): the i-th block of heads of row t."""
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    inside = head < KV_HEADS
    slot = tl.load(slot_ptr + row).to(tl.int64)
    x_ptr += row * x_stride
    cache_ptr += slot * cache_stride
    col = tl.arange(0, WIDTH_BLOCK)
    if FOUR:
        x = _rotated(x_ptr, head * x_head, inside, NORM, WIDTH, HEAD_BLOCK, STEP)
        most = _MIDDLE
    else:
        mask = inside[:, None] & (col < WIDTH)[None, :]
        x = tl.load(x_ptr + head[:, None] * x_head + col[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        most = 127.0
    top = tl.max(tl.where(x * 0.0 == 0.0, tl.abs(x), 0.0), 1)  # no NaN: it has its own way below
    inverse = most / tl.where(top > 0.0, top, 1.0)
    # A head with a number that is none has no scale either.
    tl.store(scale_ptr + slot * scale_stride + head, top / most + tl.sum(x * 0.0, 1), mask=inside)
    if FOUR:
        half: tl.constexpr = WIDTH // 2
        level = ((x * inverse[:, None] + _MIDDLE + _WHOLE) - _WHOLE).to(tl.int32) & 15
        sides = tl.reshape(level, [HEAD_BLOCK, 2, half])
        weight = tl.arange(0, 2) * 15 + 1  # the second half is the high nibble
        pair = tl.sum(sides * weight[None, :, None], 1)
        byte = tl.arange(0, half)
        at = head[:, None] * cache_head + byte[None, :]
        tl.store(cache_ptr + at, pair.to(tl.uint8), mask=inside[:, None])
    else:
        level = ((x * inverse[:, None] + _WHOLE) - _WHOLE).to(tl.int8)
        at = head[:, None] * cache_head + col[None, :]
        tl.store(cache_ptr + at, level, mask=inside[:, None] & (col < WIDTH)[None, :])


def store_scaled(k_TKH: torch.Tensor, v_TKH: torch.Tensor, cache: Cache) -> None:
    """Round keys and values by the largest number of each head, and store them."""
    for x_TKH, side in ((k_TKH, cache.keys), (v_TKH, cache.values)):
        _store(x_TKH if x_TKH.stride(2) == 1 else x_TKH.contiguous(), side, cache.slots_T)


def _store(x_TKH: torch.Tensor, side: torch.Tensor, slots_T: torch.Tensor) -> None:
    (heads, width), four = x_TKH.shape[1:], side.dtype == NIBBLES
    columns, scales = power_of_two(width), token_scales(side)
    least = _ROWS if four else 1
    block = max(least, min(power_of_two(heads), _ELEMENTS // columns))
    launch_early(
        _store_kernel,
        (len(x_TKH), ceil_div(heads, block)),
        x_TKH,
        side,
        scales,
        slots_T,
        *x_TKH.stride()[:2],
        *side.stride()[1:3],
        scales.stride(1),
        KV_HEADS=heads,
        WIDTH=width,
        HEAD_BLOCK=block,
        WIDTH_BLOCK=columns,
        FOUR=four,
        NORM=1 / math.sqrt(width),
        STEP=min(_STEP, columns),
    )


def rotate_heads(x_TNH: torch.Tensor) -> torch.Tensor:
    """Heads times the normal Hadamard matrix, its own inverse; H is 32, 64, 128 or 256."""
    x_TNH = x_TNH.contiguous()
    out, width = torch.empty_like(x_TNH), x_TNH.shape[-1]
    count = x_TNH.numel() // width
    launch_early(
        _rotate_kernel,
        (ceil_div(count, _ROWS),),
        x_TNH,
        out,
        count,
        NORM=1 / math.sqrt(width),
        WIDTH=width,
        ROWS=_ROWS,
        STEP=min(_STEP, width),
    )
    return out
