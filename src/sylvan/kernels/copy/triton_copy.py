"""Page copies on GPUs: one launch per call, whatever the number of pages and layers.

The kernel itself reads and writes pinned host memory: pages consist of many pieces, each of which
a copy engine would need its own command for. A few programs saturate the bus; they loop over all
blocks and leave the rest of the chip to the step.

Shapes: R regions, P pages, W bytes of a page in one region, N pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sylvan.kernels.copy.reference import PageBytes
from sylvan.kernels.gpu.launch import launch
from sylvan.kernels.gpu.tiles import ceil_div

_PROGRAMS = 32
"""Programs of a copy to or from the host; each has 8 KiB in flight, 1 to 2 us of bus time."""
_BLOCK = 1024  # words
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit(do_not_specialize=["blocks"])
def _host_kernel(
    memory_ptr,
    page_ptr,
    host_ptr,
    blocks,
    regions,
    region_step,
    page_step,
    width,
    EXPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy blocks of words of all regions and pages, in host order."""
    each = tl.cdiv(width, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        piece = (block // each).to(tl.int64)
        word = block % each * BLOCK + tl.arange(0, BLOCK)
        mask = word < width
        page = tl.load(page_ptr + piece // regions)
        mine = memory_ptr + (piece % regions * region_step + page * page_step)
        theirs = host_ptr + piece * width
        if EXPORT:
            tl.store(theirs + word, tl.load(mine + word, mask=mask), mask=mask)
        else:
            tl.store(mine + word, tl.load(theirs + word, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _pages_kernel(memory_ptr, copy_ptr, count, region_step, page_step, BLOCK: tl.constexpr):
    """A program does all copies in order, for one block of words of every page of a region."""
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    memory_ptr += tl.program_id(0).to(tl.int64) * region_step
    for i in range(count):
        source = tl.load(copy_ptr + 3 * i)
        target = tl.load(copy_ptr + 3 * i + 1)
        mask = word < tl.load(copy_ptr + 3 * i + 2)
        words = tl.load(memory_ptr + source * page_step + word, mask=mask)
        tl.store(memory_ptr + target * page_step + word, words, mask=mask)


def gather_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, out_NRW: torch.Tensor) -> None:
    _to_or_from_host(memory_RPW, pages_N, out_NRW, export=True)


def scatter_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, data_NRW: torch.Tensor) -> None:
    _to_or_from_host(memory_RPW, pages_N, data_NRW, export=False)


def copy_pages(memory_RPW: torch.Tensor, copies: Sequence[PageBytes]) -> None:
    most = max((num_bytes for _, _, num_bytes in copies), default=0)
    memory, size = _words(memory_RPW, *(num_bytes for _, _, num_bytes in copies))
    rows = torch.tensor(
        [(source, target, num_bytes // size) for source, target, num_bytes in copies],
        dtype=torch.int64,
        pin_memory=memory.is_cuda,
    ).to(memory.device, non_blocking=True)
    launch(
        _pages_kernel,
        (len(memory), ceil_div(most // size, _BLOCK)),
        memory,
        rows,
        len(rows),
        *memory.stride()[:2],
        BLOCK=_BLOCK,
    )


def _to_or_from_host(
    memory_RPW: torch.Tensor, pages_N: torch.Tensor, host_NRW: torch.Tensor, *, export: bool
) -> None:
    memory, _ = _words(memory_RPW, 0 if host_NRW.is_meta else host_NRW.data_ptr())
    regions, _, width = memory.shape
    blocks = len(pages_N) * regions * ceil_div(width, _BLOCK)
    launch(
        _host_kernel,
        (min(_PROGRAMS, blocks),),
        memory,
        pages_N.to(memory.device, non_blocking=True),
        host_NRW.view(memory.dtype),
        blocks,
        regions,
        *memory.stride()[:2],
        width,
        EXPORT=export,
        BLOCK=_BLOCK,
    )


def _words(memory_RPW: torch.Tensor, *numbers: int) -> tuple[torch.Tensor, int]:
    """View memory in the widest words that divide all of its strides and `numbers`."""
    steps = (*memory_RPW.stride()[:2], memory_RPW.shape[2], memory_RPW.storage_offset(), *numbers)
    for size, dtype in _WORDS:
        if not any(step % size for step in steps):
            return memory_RPW.view(dtype), size
    raise AssertionError("every number is a multiple of one")
