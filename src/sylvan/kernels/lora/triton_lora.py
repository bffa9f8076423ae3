"""Low-rank adapters on GPUs: two grouped products, each one launch for all adapters of a step.

Rows are cut into blocks with one adapter each. The first launch multiplies blocks by A, the second
one multiplies the results by B. Kernels get the matrices' addresses, so that loading an adapter
does not touch the others. Tile sizes do not depend on the number of rows, so a row's bits depend on
that row and its adapter only.

Shapes: T rows, R rows that have an adapter, K inputs, N outputs, P parts, L the largest rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.adapters import BLOCK_ROWS, DeviceRows, LoraLayer
from sylvan.kernels.gpu.launch import launch
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.lora import reference

_INNER = 64
COLS = 64
"""Outputs per program of the second product; all belong to one part."""
_MIN_BLOCK = 16  # smallest side of a matrix product


@triton.jit
def _rank_of(entry_ptr):
    return (tl.load(entry_ptr + 2) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _scale_of(entry_ptr):
    return (tl.load(entry_ptr + 2) >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _shrink_kernel(
    x_ptr,
    inner_ptr,
    table_ptr,
    listed_ptr,
    block_ptr,
    inputs,
    x_stride,
    parts,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    block_ptr += 3 * tl.program_id(0)
    part = tl.program_id(1)
    entry_ptr = table_ptr + 3 * (tl.load(block_ptr) * parts + part)
    rank = _rank_of(entry_ptr)
    if rank > 0:
        first, i = tl.load(block_ptr + 1), tl.arange(0, ROWS)
        mine = i < tl.load(block_ptr + 2)
        row = tl.load(listed_ptr + first + i, mask=mine, other=0).to(tl.int64)
        down_ptr = tl.load(entry_ptr).to(x_ptr.dtype)
        r = tl.arange(0, RANK)
        acc = tl.zeros([ROWS, RANK], tl.float32)
        for start in range(0, inputs, INNER):
            k = start + tl.arange(0, INNER)
            there = k < inputs
            x_at = x_ptr + row[:, None] * x_stride + k[None, :]
            x = tl.load(x_at, mask=mine[:, None] & there[None, :], other=0.0)
            w_at = down_ptr + r.to(tl.int64)[None, :] * inputs + k[:, None]
            w = tl.load(w_at, mask=(r < rank)[None, :] & there[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        at = inner_ptr + ((first + i).to(tl.int64) * parts + part)[:, None] * RANK + r[None, :]
        tl.store(at, acc.to(inner_ptr.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _expand_kernel(
    inner_ptr,
    y_ptr,
    table_ptr,
    listed_ptr,
    block_ptr,
    tile_ptr,
    y_stride,
    parts,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    block_ptr += 3 * tl.program_id(0)
    tile_ptr += 4 * tl.program_id(1)
    part = tl.load(tile_ptr)
    entry_ptr = table_ptr + 3 * (tl.load(block_ptr) * parts + part)
    rank = _rank_of(entry_ptr)
    if rank > 0:
        first, i = tl.load(block_ptr + 1), tl.arange(0, ROWS)
        mine = i < tl.load(block_ptr + 2)
        row = tl.load(listed_ptr + first + i, mask=mine, other=0).to(tl.int64)
        col = tl.arange(0, COLS)
        there = col < tl.load(tile_ptr + 2)
        r = tl.arange(0, RANK)
        at = inner_ptr + ((first + i).to(tl.int64) * parts + part)[:, None] * RANK + r[None, :]
        inner = tl.load(at, mask=mine[:, None], other=0.0)
        up_ptr = tl.load(entry_ptr + 1).to(inner_ptr.dtype)
        out = (tl.load(tile_ptr + 1) + col).to(tl.int64)
        w_at = up_ptr + out[None, :] * rank + r[:, None]
        w = tl.load(w_at, mask=(r < rank)[:, None] & there[None, :], other=0.0)
        change = tl.dot(inner, w, input_precision="ieee") * _scale_of(entry_ptr)
        y_at = y_ptr + row[:, None] * y_stride + tl.load(tile_ptr + 3) + out[None, :]
        inside = mine[:, None] & there[None, :]
        y = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + change
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)


def lora(x: torch.Tensor, y: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """Add the adapters' changes; the few rows of a head use the reference."""
    if layer.of_outputs or x.stride(-1) != 1 or y.stride(-1) != 1:
        return reference.lora(x, y, layer)
    if layer.rows.groups and layer.is_changed:  # captured steps have neither
        grouped(x, y, layer.rows.on_device(x.device), layer)
    return y


def grouped(x: torch.Tensor, y: torch.Tensor, rows: DeviceRows, layer: LoraLayer) -> None:
    """Compute both products for all adapters of a step, and add the result to y."""
    parts, rank = len(layer.outputs), max(_MIN_BLOCK, power_of_two(layer.rows.max_rank))
    table, tiles = layer.device_table(x.device), layer.device_tiles(x.device, COLS)
    inner = x.new_empty(len(rows.listed), parts, rank)
    blocks = len(rows.blocks)
    launch(
        _shrink_kernel,
        (blocks, parts),
        x,
        inner,
        table,
        rows.listed,
        rows.blocks,
        layer.inputs,
        x.stride(0),
        parts,
        RANK=rank,
        ROWS=BLOCK_ROWS,
        INNER=_INNER,
    )
    launch(
        _expand_kernel,
        (blocks, sum(ceil_div(size, COLS) for size in layer.outputs)),
        inner,
        y,
        table,
        rows.listed,
        rows.blocks,
        tiles,
        y.stride(0),
        parts,
        RANK=rank,
        ROWS=BLOCK_ROWS,
        COLS=COLS,
    )
