"""Sampling on GPUs: each row has its own parameters; without sorting or host synchronisation.

Edits of logits take one or two launches if there are any. A draw consists of a pass over all parts
of all rows (`triton_parts`), which reads the logits once; if any row has filters, five launches
that narrow the ids to a few (`triton_narrow`), which read the logits again for flat rows only; and
one program per row that draws (`triton_draw`). Scratch memory is a fifth of the logits. Random
numbers are keyed by (seed, sample, position) as everywhere in Sylvan: a request draws the same
tokens on a GPU as on a CPU, except where rounding breaks ties.

Shapes: R rows, V vocabulary, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.sample.device import Drawn, LogitEdits, RowParams
from sylvan.kernels.sample.triton_draw import draw_kernel
from sylvan.kernels.sample.triton_narrow import bracket_kernel, gather_kernel, narrow_kernel
from sylvan.kernels.sample.triton_parts import parts_kernel

_EDIT_BLOCK = 1024


@triton.jit
def _edit_kernel(
    logits_ptr,
    count_ptr,
    count_row_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    bit_ptr,
    bit_row_ptr,
    vocab,
    stride,
    bit_stride,
    PENALISED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    x = tl.load(logits_ptr + row * stride + i, mask=inside, other=0.0)
    if PENALISED:
        at = tl.load(count_row_ptr + row).to(tl.int64)
        count = tl.load(count_ptr + at * vocab + i, mask=inside & (at >= 0), other=0.0)
        less = x - tl.load(frequency_ptr + row) * count - tl.load(presence_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        scaled = tl.where(less > 0, less / repetition, less * repetition)
        x = tl.where(count > 0, scaled, x)
    if MASKED:
        at = tl.load(bit_row_ptr + row).to(tl.int64)
        words = tl.load(bit_ptr + at * bit_stride + i // 32, mask=inside & (at >= 0), other=-1)
        x = tl.where((words >> (i % 32)) & 1 != 0, x, float("-inf"))
    tl.store(logits_ptr + row * stride + i, x, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _entries_kernel(logits_ptr, row_ptr, id_ptr, value_ptr, count, stride, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < count
    row = tl.load(row_ptr + e, mask=inside, other=0).to(tl.int64)
    at = row * stride + tl.load(id_ptr + e, mask=inside, other=0)
    value = tl.load(value_ptr + e, mask=inside, other=0.0)
    # An id may have a bias and a ban; -inf wins in any order of adding.
    tl.atomic_add(logits_ptr + at, value, mask=inside)


def edit(logits_RV: torch.Tensor, edits: LogitEdits) -> None:
    """Edit logits in place: penalties, then masks, then bias."""
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    rows, vocab = logits_RV.shape
    x = logits_RV  # placeholder for absent tensors
    if edits.counts is not None or edits.mask_bits is not None:
        bits = x if edits.mask_bits is None else edits.mask_bits
        launch(
            _edit_kernel,
            (rows, ceil_div(vocab, _EDIT_BLOCK)),
            x,
            *(
                x if part is None else part
                for part in (
                    edits.counts,
                    edits.count_rows,
                    edits.frequency,
                    edits.presence,
                    edits.repetition,
                )
            ),
            bits,
            x if edits.mask_rows is None else edits.mask_rows,
            vocab,
            x.stride(0),
            bits.stride(0),
            PENALISED=edits.counts is not None,
            MASKED=edits.mask_bits is not None,
            BLOCK=_EDIT_BLOCK,
        )
    if edits.entry_ids is not None:
        count = len(edits.entry_ids)
        launch(
            _entries_kernel,
            (ceil_div(count, 128),),
            x,
            edits.entry_rows,
            edits.entry_ids,
            edits.entry_values,
            count,
            x.stride(0),
            BLOCK=128,
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Partition of rows: ids per part and per block, gathered ids per row, pivots."""

    part: int = 8192
    block: int = 32
    slots: int = 2048
    pivots: int = 16
    chunk: int = 1024


_SMALL = _Sizes(part=128, block=8, slots=32, pivots=4, chunk=128)
_PASSES = 3  # of narrowing


@dataclass(frozen=True, slots=True)
class _Parts:
    """Outputs of the first pass; see `parts_kernel`."""

    peaks: torch.Tensor
    ids: torch.Tensor
    sums: torch.Tensor
    block_peaks: torch.Tensor
    block_sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Found:
    """Outputs of narrowing for filtered rows; see `bracket_kernel` and `gather_kernel`."""

    mode: torch.Tensor
    level: torch.Tensor
    inside: torch.Tensor
    over: torch.Tensor
    over_mass: torch.Tensor
    slots: torch.Tensor


def _cut(logits_RV: torch.Tensor) -> tuple[_Sizes, dict[str, int]]:
    """Partition of these rows, and the block size of the kernel that reads all blocks of a row."""
    vocab = logits_RV.shape[1]
    if arch_of(logits_RV) == "interpreter":
        sizes = _SMALL  # lets tests use many parts with a small vocabulary
    else:
        sizes = _Sizes()
        sizes = replace(sizes, block=sizes.block * power_of_two(ceil_div(vocab, 32 * sizes.part)))
    parts = ceil_div(vocab, sizes.part)
    return sizes, {
        "PARTS": parts,
        "PART_BLOCK": power_of_two(parts),
        "BLOCKS": sizes.part // sizes.block,
        "BLOCK": sizes.block,
    }


def _but(cut: dict[str, int], *names: str) -> dict[str, int]:
    return {name: value for name, value in cut.items() if name not in names}


def _first_pass(logits_RV: torch.Tensor, rows: RowParams, cut: dict[str, int]) -> _Parts:
    count, vocab = logits_RV.shape
    parts = (count, cut["PARTS"])
    blocks = (count, cut["PARTS"] * cut["BLOCKS"])
    new = logits_RV.new_empty
    found = _Parts(new(parts), new(parts, dtype=torch.int32), new(parts), new(blocks), new(blocks))
    launch(
        parts_kernel,
        parts,
        logits_RV,
        rows.temperature,
        found.peaks,
        found.ids,
        found.sums,
        found.block_peaks,
        found.block_sums,
        vocab,
        logits_RV.stride(0),
        **_but(cut, "PART_BLOCK"),
        num_warps=16,
    )
    return found


def _find(
    logits_RV: torch.Tensor, rows: RowParams, parts: _Parts, sizes: _Sizes, cut: dict[str, int]
) -> _Found:
    """Narrow rows with filters; skip the launches if no row has any."""
    count, vocab = logits_RV.shape
    grid = (count, cut["PARTS"])
    new, int32 = logits_RV.new_empty, torch.int32
    mode, k, level = (new(s, dtype=int32) for s in (count, count, (_PASSES + 1, count, 2)))
    top, wanted = new(count), new(count, dtype=torch.float64)
    launch(
        bracket_kernel,
        (count,),
        parts.peaks,
        parts.sums,
        parts.block_peaks,
        parts.block_sums,
        rows.greedy,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        mode,
        k,
        top,
        wanted,
        level,
        vocab,
        **cut,
        ALL_BLOCKS=power_of_two(cut["PARTS"] * cut["BLOCKS"]),
        SLOTS=sizes.slots,
        num_warps=16,
    )
    near = new((_PASSES, *grid, 2), dtype=int32)
    above = (_PASSES, *grid, sizes.pivots)
    bracket = (mode, k, top, wanted, level, near, new(above, dtype=int32), new(above))
    for passes in range(_PASSES):
        launch(
            narrow_kernel,
            grid,
            logits_RV,
            rows.temperature,
            *bracket,
            vocab,
            logits_RV.stride(0),
            passes,
            **_but(cut, "BLOCKS", "BLOCK"),
            PART=sizes.part,
            PIVOTS=sizes.pivots,
            num_warps=16,
        )
    inside, over, over_mass = new(grid, dtype=int32), new(grid, dtype=int32), new(grid)
    slots = new((*grid, sizes.slots), dtype=torch.int16)
    launch(
        gather_kernel,
        grid,
        logits_RV,
        rows.temperature,
        parts.block_peaks,
        *bracket,
        inside,
        over,
        over_mass,
        slots,
        vocab,
        logits_RV.stride(0),
        PASSES=_PASSES,
        **cut,
        PIVOTS=sizes.pivots,
        SLOTS=sizes.slots,
        num_warps=16,
    )
    return _Found(mode, level, inside, over, over_mass, slots)


def draw(logits_RV: torch.Tensor, rows: RowParams, *, filtered: bool = True) -> Drawn:
    """Draw one id per row from float32 logits to which only temperature has not been applied.

    The results equal those of `sylvan.runtime.sampling.draw`. `filtered` False promises that no row
    has top-k, top-p or min-p, except greedy rows; it only saves launches.
    """
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    count, vocab = logits_RV.shape
    sizes, cut = _cut(logits_RV)
    parts = _first_pass(logits_RV, rows, cut)
    ids, sums = parts.ids, parts.sums
    found = _Found(ids, ids, ids, ids, sums, ids.view(torch.int16))  # unread placeholders
    if filtered:
        found = _find(logits_RV, rows, parts, sizes, cut)
    drawn = logits_RV.new_empty(count, dtype=torch.int32)
    logprobs, logsumexp = logits_RV.new_empty(count), logits_RV.new_empty(count)
    launch(
        draw_kernel,
        (count,),
        logits_RV,
        parts.peaks,
        parts.ids,
        parts.sums,
        rows.greedy,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.sample,
        rows.position,
        found.mode,
        found.level,
        found.inside,
        found.over,
        found.over_mass,
        found.slots,
        drawn,
        logprobs,
        logsumexp,
        vocab,
        logits_RV.stride(0),
        PASSES=_PASSES,
        **cut,
        SLOTS=sizes.slots,
        CHUNK=sizes.chunk,
        num_warps=8,
    )
    return Drawn(drawn, logprobs, logsumexp)
