"""Sums over the ranks of one machine on GPUs, through memory that each of them can address.

A rank has a room for numbers and a pad of signals, and knows the addresses of all of them. Program
p of a rank meets program p of the others only, so nothing waits for a whole launch. Sums are taken
in float32, over the tree of `reference.tree_sum`: the same bits on every rank, and by either way.

One-shot: a rank reads the rooms of all. Two-shot: it adds up one share, writes that to all rooms,
and reads its own; of N ranks, each then reads and writes about 2/N of what one-shot reads.

Shapes: N ranks, C numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch
from sylvan.kernels.gpu.tiles import ceil_div

BLOCK = 1024
PROGRAMS = 64
"""Programs of a launch, all of which must be resident at once: they wait for other ranks."""
ONE_SHOT_BYTES = 4 * BLOCK * PROGRAMS
"""Size of the largest message for `one_shot`; beyond it, reading all rooms takes longer."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """Where the ranks meet, as one of them sees it.

    Attributes:
        rooms_N: int64 addresses of the rooms, float32 each.
        pads_N: int64 addresses of the pads, int32 (PROGRAMS, N) each, zero between launches.
        rank: Of this process.
        capacity: Numbers of a room.
    """

    rooms_N: torch.Tensor
    pads_N: torch.Tensor
    rank: int
    capacity: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rooms_N)


@triton.jit
def _meet(pads_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until this program of all ranks is here; what they wrote before is visible then."""
    tl.debug_barrier()
    pad = tl.program_id(0) * SIZE
    for other in range(SIZE):
        theirs = tl.load(pads_ptr + other).to(tl.pointer_type(tl.int32)) + pad + RANK
        while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
            pass
    mine = tl.load(pads_ptr + RANK).to(tl.pointer_type(tl.int32)) + pad
    for other in range(SIZE):
        while tl.atomic_cas(mine + other, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit
def _room(rooms_ptr, rank):
    return tl.load(rooms_ptr + rank).to(tl.pointer_type(tl.float32))


@triton.jit
def _tree_sum(rooms_ptr, place, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Neighbours in pairs, then pairs of pairs. COUNT is a power of two; -0.0 changes no sum."""
    if COUNT > 1:
        left = _tree_sum(rooms_ptr, place, mask, FIRST, COUNT // 2, SIZE)
        found = left + _tree_sum(rooms_ptr, place, mask, FIRST + COUNT // 2, COUNT // 2, SIZE)
    elif FIRST < SIZE:
        found = tl.load(_room(rooms_ptr, FIRST) + place, mask=mask, volatile=True)
    else:
        found = tl.full(place.shape, -0.0, tl.float32)
    return found


@triton.jit(do_not_specialize=["count"])
def one_shot_kernel(
    x_ptr,
    out_ptr,
    rooms_ptr,
    pads_ptr,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has one block of numbers."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(_room(rooms_ptr, RANK) + place, tl.load(x_ptr + place, mask=mask), mask=mask)
    _meet(pads_ptr, RANK, SIZE)
    total = _tree_sum(rooms_ptr, place, mask, 0, PADDED, SIZE)
    tl.store(out_ptr + place, total, mask=mask)
    _meet(pads_ptr, RANK, SIZE)  # nobody may write into a room that others still read


@triton.jit(do_not_specialize=["count"])
def two_shot_kernel(
    x_ptr,
    out_ptr,
    rooms_ptr,
    pads_ptr,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has as many blocks as there are ranks, in turn; each rank adds up its block."""
    each = SIZE * BLOCK
    mine = _room(rooms_ptr, RANK)
    step = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        for other in range(SIZE):
            place = first + other * BLOCK + step
            mask = place < count
            tl.store(mine + place, tl.load(x_ptr + place, mask=mask), mask=mask)
    _meet(pads_ptr, RANK, SIZE)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        place = first + RANK * BLOCK + step
        mask = place < count
        total = _tree_sum(rooms_ptr, place, mask, 0, PADDED, SIZE)
        for other in range(SIZE):
            tl.store(_room(rooms_ptr, other) + place, total, mask=mask)
    _meet(pads_ptr, RANK, SIZE)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        for other in range(SIZE):
            place = first + other * BLOCK + step
            mask = place < count
            total = tl.load(mine + place, mask=mask, volatile=True)
            tl.store(out_ptr + place, total, mask=mask)


def one_shot(x_C: torch.Tensor, rooms: Rooms) -> torch.Tensor:
    """The sum of all ranks' x, float32 and contiguous; at most `ONE_SHOT_BYTES`."""
    out_C = torch.empty_like(x_C)
    grid = (ceil_div(x_C.numel(), BLOCK),)
    assert grid[0] <= PROGRAMS, "programs beyond this may not be resident"
    _start(one_shot_kernel, grid, x_C, out_C, rooms)
    return out_C


def two_shot(x_C: torch.Tensor, rooms: Rooms) -> torch.Tensor:
    """The sum of all ranks' x, float32 and contiguous; at most `Rooms.capacity` numbers."""
    out_C = torch.empty_like(x_C)
    blocks = ceil_div(x_C.numel(), BLOCK * rooms.size)
    _start(two_shot_kernel, (min(blocks, PROGRAMS),), x_C, out_C, rooms)
    return out_C


def _start(kernel: Any, grid: tuple[int], x: torch.Tensor, out: torch.Tensor, rooms: Rooms) -> None:
    launch(
        kernel,
        grid,
        x,
        out,
        rooms.rooms_N,
        rooms.pads_N,
        x.numel(),
        RANK=rooms.rank,
        SIZE=rooms.size,
        PADDED=triton.next_power_of_2(rooms.size),
        BLOCK=BLOCK,
    )
