"""Sums over the ranks of one machine on GPUs, through memory that each of them can address.

Each rank has a buffer for numbers and a signal pad, and knows the addresses of those of all ranks.
Program p of a rank synchronises only with program p of the others, so no program waits for a whole
launch. Sums are computed in float32 over the tree of `reference.tree_sum`, so both kernels give the
same bits on every rank.

One-shot: each rank reads all buffers. Two-shot: each rank sums one shard, writes it to all buffers,
then reads its own; with N ranks it reads and writes about 2/N of the bytes that one-shot reads.

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
"""Size of the largest message for `one_shot`; beyond it, reading all buffers takes longer."""


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Buffers and signal pads of all ranks, as one rank addresses them.

    Attributes:
        buffers_N: int64 addresses of the buffers, float32 each.
        pads_N: int64 addresses of the pads, int32 (PROGRAMS, N) each, zero between launches.
        rank: Rank of this process.
        capacity: Size of a buffer in numbers.
    """

    buffers_N: torch.Tensor
    pads_N: torch.Tensor
    rank: int
    capacity: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.buffers_N)


@triton.jit
def _barrier(pads_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait for this program on all ranks; their earlier writes are visible afterwards."""
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
def _buffer(buffers_ptr, rank):
    return tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.float32))


@triton.jit
def _tree_sum(
    buffers_ptr, place, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr
):
    """Neighbours in pairs, then pairs of pairs. COUNT is a power of two; -0.0 changes no sum."""
    if COUNT > 1:
        left = _tree_sum(buffers_ptr, place, mask, FIRST, COUNT // 2, SIZE)
        found = left + _tree_sum(buffers_ptr, place, mask, FIRST + COUNT // 2, COUNT // 2, SIZE)
    elif FIRST < SIZE:
        found = tl.load(_buffer(buffers_ptr, FIRST) + place, mask=mask, volatile=True)
    else:
        found = tl.full(place.shape, -0.0, tl.float32)
    return found


@triton.jit(do_not_specialize=["count"])
def one_shot_kernel(
    x_ptr,
    out_ptr,
    buffers_ptr,
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
    tl.store(_buffer(buffers_ptr, RANK) + place, tl.load(x_ptr + place, mask=mask), mask=mask)
    _barrier(pads_ptr, RANK, SIZE)
    total = _tree_sum(buffers_ptr, place, mask, 0, PADDED, SIZE)
    tl.store(out_ptr + place, total, mask=mask)
    _barrier(pads_ptr, RANK, SIZE)  # no rank may overwrite a buffer that others still read


@triton.jit(do_not_specialize=["count"])
def two_shot_kernel(
    x_ptr,
    out_ptr,
    buffers_ptr,
    pads_ptr,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program loops over groups of one block per rank; each rank sums its block of a group."""
    each = SIZE * BLOCK
    mine = _buffer(buffers_ptr, RANK)
    step = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        for other in range(SIZE):
            place = first + other * BLOCK + step
            mask = place < count
            tl.store(mine + place, tl.load(x_ptr + place, mask=mask), mask=mask)
    _barrier(pads_ptr, RANK, SIZE)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        place = first + RANK * BLOCK + step
        mask = place < count
        total = _tree_sum(buffers_ptr, place, mask, 0, PADDED, SIZE)
        for other in range(SIZE):
            tl.store(_buffer(buffers_ptr, other) + place, total, mask=mask)
    _barrier(pads_ptr, RANK, SIZE)
    for first in range(tl.program_id(0) * each, count, tl.num_programs(0) * each):
        for other in range(SIZE):
            place = first + other * BLOCK + step
            mask = place < count
            total = tl.load(mine + place, mask=mask, volatile=True)
            tl.store(out_ptr + place, total, mask=mask)


def one_shot(x_C: torch.Tensor, buffers: PeerBuffers) -> torch.Tensor:
    """The sum of all ranks' x, float32 and contiguous; at most `ONE_SHOT_BYTES`."""
    out_C = torch.empty_like(x_C)
    grid = (ceil_div(x_C.numel(), BLOCK),)
    assert grid[0] <= PROGRAMS, "programs beyond this may not be resident"
    _start(one_shot_kernel, grid, x_C, out_C, buffers)
    return out_C


def two_shot(x_C: torch.Tensor, buffers: PeerBuffers) -> torch.Tensor:
    """The sum of all ranks' x, float32 and contiguous; at most `PeerBuffers.capacity` numbers."""
    out_C = torch.empty_like(x_C)
    blocks = ceil_div(x_C.numel(), BLOCK * buffers.size)
    _start(two_shot_kernel, (min(blocks, PROGRAMS),), x_C, out_C, buffers)
    return out_C


def _start(
    kernel: Any, grid: tuple[int], x: torch.Tensor, out: torch.Tensor, buffers: PeerBuffers
) -> None:
    launch(
        kernel,
        grid,
        x,
        out,
        buffers.buffers_N,
        buffers.pads_N,
        x.numel(),
        RANK=buffers.rank,
        SIZE=buffers.size,
        PADDED=triton.next_power_of_2(buffers.size),
        BLOCK=BLOCK,
    )
