"""Aligns (row, expert) pairs to tiles such that each tile belongs to one expert (moe_align).

Row counts stay on the device, so the grid has the largest possible number of tiles; unused tiles
have no expert. Few pairs take one launch, with a program per expert that scans all pairs. Many
pairs take launches that clear, count, compute offsets, and place. The order within an expert is
then arbitrary, which changes no result: a row of a product does not depend on its place.

Shapes: T rows, E experts, K experts of a row, P = T K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch, launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.gpu.triton_early import inputs_ready

_FEW = 4096  # most pairs for one launch, where each expert's program scans all of them
_CHUNK = 512  # pairs scanned at once
_BLOCK = 256


@triton.jit(do_not_specialize=["pairs", "row_tiles"])
def _place_few_kernel(
    ids_ptr,
    pair_ptr,
    owner_ptr,
    load_ptr,
    pairs,
    row_tiles,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program e writes tiles, load and pairs of expert e, in the order of the pairs."""
    inputs_ready(EARLY)
    mine = tl.program_id(0)
    some = tl.arange(0, CHUNK)
    loads = tl.zeros([EXPERT_BLOCK], tl.int32)
    for start in range(0, pairs, CHUNK):
        real = start + some < pairs
        ids = tl.load(ids_ptr + start + some, mask=real, other=0).to(tl.int32)
        loads += tl.histogram(ids, EXPERT_BLOCK, mask=real)
    expert = tl.arange(0, EXPERT_BLOCK)
    tiles = (loads + ROWS - 1) // ROWS
    first = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    own = tl.sum(tl.where(expert == mine, tiles, 0), 0)
    load = tl.sum(tl.where(expert == mine, loads, 0), 0)
    tl.store(load_ptr + mine, load.to(tl.int64))
    for start in range(0, own, CHUNK):
        tl.store(owner_ptr + first + start + some, mine, mask=start + some < own)
    if mine == 0:
        for start in range(tl.sum(tiles, 0), row_tiles, CHUNK):
            tl.store(owner_ptr + start + some, -1, mask=start + some < row_tiles)
    place = first * ROWS
    rest = load + tl.arange(0, ROWS)
    tl.store(pair_ptr + place + rest, -1, mask=rest < own * ROWS)
    for start in range(0, pairs, CHUNK):
        real = start + some < pairs
        ids = tl.load(ids_ptr + start + some, mask=real, other=0).to(tl.int32)
        found = (real & (ids == mine)).to(tl.int32)
        nth = tl.cumsum(found, 0) - 1
        tl.store(pair_ptr + place + nth, start + some, mask=found > 0)
        place += tl.sum(found, 0)


@triton.jit(do_not_specialize=["pairs", "slots"])
def _count_kernel(ids_ptr, slot_ptr, load_ptr, pairs, slots, BLOCK: tl.constexpr):
    """Count the pairs of each expert, and mark all slots as empty."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(slot_ptr + at, -1, mask=at < slots)
    expert = tl.load(ids_ptr + at, mask=at < pairs, other=0)
    tl.atomic_add(load_ptr + expert, 1, mask=at < pairs)


@triton.jit
def _offsets_kernel(
    load_ptr, next_ptr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """First place of each expert, aligned to tiles."""
    expert = tl.arange(0, BLOCK)
    load = tl.load(load_ptr + expert, mask=expert < EXPERTS, other=0).to(tl.int32)
    places = (load + ROWS - 1) // ROWS * ROWS
    tl.store(next_ptr + expert, tl.cumsum(places, 0) - places, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    ids_ptr, next_ptr, pair_ptr, owner_ptr, pairs, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Give each pair the next place of its expert; a tile's first pair sets the tile's expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=real, other=0).to(tl.int32)
    place = tl.atomic_add(next_ptr + expert, 1, mask=real)
    tl.store(pair_ptr + place, pair, mask=real)
    tl.store(owner_ptr + place // ROWS, expert, mask=real & (place % ROWS == 0))


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs sorted by expert, int32: the pair of each place, and the expert of each tile.

    Unused places and tiles are -1. `load_E`, int64: pairs of each expert.
    """

    pairs: torch.Tensor
    owners: torch.Tensor
    load_E: torch.Tensor
    row_tiles: int

    @property
    def rows(self) -> int:
        """Places of a tile."""
        return len(self.pairs) // self.row_tiles

    @staticmethod
    def of(ids_TK: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
        """Places in tiles of `rows`."""
        ids, count = ids_TK.contiguous(), ids_TK.numel()
        row_tiles = (count + min(num_experts, count) * (rows - 1)) // rows
        slots = ids.new_empty(row_tiles * (rows + 1), dtype=torch.int32)
        pairs, owners = slots[: row_tiles * rows], slots[row_tiles * rows :]
        fill = _few if count <= _FEW else _many
        return ExpertTiles(pairs, owners, fill(ids, slots, num_experts, rows), row_tiles)


def _few(ids: torch.Tensor, slots: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """One launch. Returns: the load."""
    load_E = ids.new_empty(num_experts, dtype=torch.int64)
    row_tiles = len(slots) // (rows + 1)
    launch_early(
        _place_few_kernel,
        (num_experts,),
        ids,
        slots,
        slots[row_tiles * rows :],
        load_E,
        ids.numel(),
        row_tiles,
        EXPERT_BLOCK=power_of_two(num_experts),
        ROWS=rows,
        CHUNK=_CHUNK,
    )
    return load_E


def _many(ids: torch.Tensor, slots: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """Four launches. Returns: the load."""
    count, row_tiles = ids.numel(), len(slots) // (rows + 1)
    load_E = ids.new_zeros(num_experts, dtype=torch.int64)
    next_E = ids.new_empty(num_experts, dtype=torch.int32)
    grid = (ceil_div(len(slots), _BLOCK),)
    launch(_count_kernel, grid, ids, slots, load_E, count, len(slots), BLOCK=_BLOCK)
    block = power_of_two(num_experts)
    launch(_offsets_kernel, (1,), load_E, next_E, EXPERTS=num_experts, BLOCK=block, ROWS=rows)
    owners, grid = slots[row_tiles * rows :], (ceil_div(count, _BLOCK),)
    launch(_place_kernel, grid, ids, next_E, slots, owners, count, ROWS=rows, BLOCK=_BLOCK)
    return load_E
