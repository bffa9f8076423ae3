"""Sampling on GPUs: every row with its own parameters, nothing sorted, nothing awaited.

Three launches: what changes logits (only if something does), one pass for the maximum and the sum
of each part of a row, and one program a row that draws. Random numbers are Philox4x32-10 (Salmon et
al., SC 2011), keyed by (seed, sample, position) as everywhere in Sylvan: a request draws the same
tokens on a GPU as on a CPU, but for ties broken by rounding.

Shapes: R rows, V vocabulary, E entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.sample.device import Drawn, Edits, Rows
from sylvan.kernels.sample.triton_search import (
    ALL,
    above_and_at,
    clean,
    first_beyond,
    level_of,
)

_PART = 8192  # of a row, a program's share of the first pass
_BLOCK = 2048
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
    # A bias and a ban may meet at an id; added one after the other they come to the ban.
    tl.atomic_add(logits_ptr + at, value, mask=inside)


@triton.jit
def _parts_kernel(
    logits_ptr,
    temperature_ptr,
    peak_ptr,
    id_ptr,
    sum_ptr,
    vocab,
    stride,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Maximum, its first id, and sum of exp((x - maximum) / temperature) of a part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    x = tl.load(logits_ptr + row * stride + i, mask=i < vocab, other=float("-inf"))
    x = clean(x)
    peak = tl.max(x, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp((x - level) / tl.load(temperature_ptr + row)), 0)
    tl.store(peak_ptr + row * PARTS + part, peak)
    tl.store(id_ptr + row * PARTS + part, tl.min(tl.where(x == peak, i, ALL), 0))
    tl.store(sum_ptr + row * PARTS + part, total)


@triton.jit
def _uniform(seed, sample, position):
    """A number in [0, 1) with 53 random bits; see `runtime.sampling.philox`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(seed, low, high, sample.to(tl.uint32), low ^ low)
    a, b = words[0] >> 5, words[1] >> 6
    return (a.to(tl.float64) * 67108864.0 + b.to(tl.float64)) / 9007199254740992.0


@triton.jit
def _draw_kernel(
    logits_ptr,
    peak_ptr,
    part_id_ptr,
    sum_ptr,
    greedy_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    id_ptr,
    logprob_ptr,
    logsumexp_ptr,
    vocab,
    stride,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    part = tl.arange(0, PART_BLOCK)
    there = part < PARTS
    peaks = tl.load(peak_ptr + row * PARTS + part, mask=there, other=float("-inf"))
    ids = tl.load(part_id_ptr + row * PARTS + part, mask=there, other=ALL)
    top = tl.max(peaks, 0)
    temperature = tl.load(temperature_ptr + row)
    if top == float("-inf"):
        tl.store(id_ptr + row, -1)
        tl.store(logprob_ptr + row, float("-inf"))
        tl.store(logsumexp_ptr + row, float("-inf"))
    else:
        sums = tl.load(sum_ptr + row * PARTS + part, mask=there, other=0.0)
        total = tl.sum(sums * tl.exp((peaks - top) / temperature), 0)
        drawn = tl.min(tl.where(peaks == top, ids, ALL), 0)
        if tl.load(greedy_ptr + row) == 0:
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            level, ties, mass = -1.0, ALL, total.to(tl.float64)
            if top_k < vocab:
                k = top_k.to(tl.float64)
                level = level_of(row_ptr, vocab, top, temperature, k, False, BLOCK)
                more, above, _ = above_and_at(row_ptr, vocab, top, temperature, level, BLOCK)
                ties = top_k - more
                mass = above + ties * level.to(tl.float64)
            if top_p < 1.0:
                # With min-p the mass is that of the first k; without it, of everything. Borders
                # are double, as in the definition: equal weights often meet them exactly.
                wanted = top_p * tl.where(min_p > 0.0, mass, total.to(tl.float64))
                other = level_of(row_ptr, vocab, top, temperature, wanted, True, BLOCK)
                _, above, at = above_and_at(row_ptr, vocab, top, temperature, other, BLOCK)
                fit = tl.ceil((wanted - above) / tl.maximum(other, 1e-38).to(tl.float64))
                fit = tl.minimum(tl.maximum(fit, 1.0), at.to(tl.float64)).to(tl.int32)
                both = tl.where(other == level, tl.minimum(fit, ties), ties)
                ties = tl.where(other > level, fit, both)
                level = tl.maximum(other, level)
            if min_p > level:
                level, ties = min_p, ALL
            if level > 0.0:
                _, above, at = above_and_at(row_ptr, vocab, top, temperature, level, BLOCK)
                mass = above + tl.minimum(at, ties) * level.to(tl.float64)
            position = tl.load(position_ptr + row)
            u = _uniform(tl.load(seed_ptr + row), tl.load(sample_ptr + row), position)
            goal = u * mass
            drawn = first_beyond(row_ptr, vocab, top, temperature, level, ties, goal, BLOCK)
        chosen = clean(tl.load(row_ptr + drawn))
        tl.store(id_ptr + row, drawn)
        tl.store(logprob_ptr + row, (chosen - top) / temperature - tl.log(total))
        tl.store(logsumexp_ptr + row, top / temperature + tl.log(total))


def edit(logits_RV: torch.Tensor, edits: Edits) -> None:
    """Change logits in place: penalties, then what is allowed, then bias; the contract's order."""
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    rows, vocab = logits_RV.shape
    x = logits_RV  # stands for what is not there
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


def draw(logits_RV: torch.Tensor, rows: Rows) -> Drawn:
    """Draw one id a row from float32 logits that are final but for temperature.

    The definition, and so the result, is that of `sylvan.runtime.sampling.draw`.
    """
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    count, vocab = logits_RV.shape
    small = arch_of(logits_RV) == "interpreter"  # where parts of a small vocabulary are tested
    size = 64 if small else _PART
    parts = ceil_div(vocab, size)
    peaks, sums, logprobs, logsumexp = (
        logits_RV.new_empty(shape) for shape in ((count, parts), (count, parts), count, count)
    )
    part_ids, ids = (
        logits_RV.new_empty(shape, dtype=torch.int32) for shape in ((count, parts), count)
    )
    launch(
        _parts_kernel,
        (count, parts),
        logits_RV,
        rows.temperature,
        peaks,
        part_ids,
        sums,
        vocab,
        logits_RV.stride(0),
        PARTS=parts,
        PART=size,
        num_warps=8,
    )
    launch(
        _draw_kernel,
        (count,),
        logits_RV,
        peaks,
        part_ids,
        sums,
        rows.greedy,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.sample,
        rows.position,
        ids,
        logprobs,
        logsumexp,
        vocab,
        logits_RV.stride(0),
        PARTS=parts,
        PART_BLOCK=power_of_two(parts),
        BLOCK=128 if small else _BLOCK,
        num_warps=8,
    )
    return Drawn(ids, logprobs, logsumexp)
