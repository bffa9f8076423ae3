"""Unpacks weights from kernel order, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from sylvan.kernels.matmul.codes import packed_bits_of, paired
from sylvan.kernels.matmul.packed import LANES, PackedWeight
from sylvan.kernels.matmul.weights import CodedWeight, Int4Weight, Int8Weight, QuantisedWeight
from sylvan.kernels.memory import Bytes


def unpack(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor | QuantisedWeight:
    """Unpack a matrix that was packed for rows of `dtype`, into new tensors."""
    words = torch.from_numpy(packed.data.view(np.int32)).view(-1, packed.words, LANES)
    levels = words.transpose(1, 2).reshape(packed.padded_rows, packed.words).contiguous()
    if packed.kind == "dense":
        return levels.view(dtype)[: packed.rows, : packed.cols].clone()
    if packed.kind == "coded":
        return _coded(packed, levels)
    scale = torch.from_numpy(_part(packed.scale).view(np.float32))
    if packed.kind == "int8":
        q = levels.view(torch.int8)[: packed.rows, : packed.cols].clone()
        return Int8Weight(q, scale[: packed.rows].clone())
    bytes_NW4 = levels.view(torch.uint8).unflatten(1, (-1, 4))
    eights = torch.stack((bytes_NW4 & 15, bytes_NW4 >> 4), 2)  # of eight inputs: first, last four
    nibbles = eights.flatten(1)[: packed.rows, : packed.cols]
    q = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    groups = packed.cols // packed.group
    lanes = scale.view(packed.padded_rows // LANES, -1, LANES).transpose(1, 2).flatten(0, 1)
    return Int4Weight(q.contiguous(), lanes[: packed.rows, :groups].contiguous(), packed.group)


def _coded(packed: PackedWeight, words: torch.Tensor) -> CodedWeight:
    form, raw = packed.form, words.view(torch.uint8)[: packed.rows]
    assert form.code
    match packed_bits_of(form.code):
        case 4:
            q = paired(_four_bits(raw))[:, : packed.cols // 2]
        case 6:
            threes = raw.unflatten(1, (-1, 3, 4))
            low = _four_bits(threes[:, :, :2].flatten(1))
            q = (low | _two_bits(threes[:, :, 2]) << 4)[:, : packed.cols]
        case _:
            q = raw.unflatten(1, (-1, 2, 2)).transpose(-1, -2).flatten(1)[:, : packed.cols]
    scale = _of_groups(torch.from_numpy(_part(packed.scale)).view(form.scale), packed)
    zero = _of_groups(torch.from_numpy(packed.zeros), packed) if packed.zeros is not None else None
    shift = step = shift_step = None
    if packed.shifts is not None:
        kind = torch.float32 if packed.steps is None else torch.int8
        shift = _of_groups(torch.from_numpy(packed.shifts).view(kind), packed)
    if packed.steps is not None:
        steps = _of_lanes(torch.from_numpy(packed.steps).view(torch.float16), packed)
        if packed.shifts is None:
            step = steps
        else:
            step, shift_step = steps[:, ::2].contiguous(), steps[:, 1::2].contiguous()
    order = packed.order
    found = None if order is None else torch.from_numpy(order.view(np.int32)).clone()
    return CodedWeight(
        q.contiguous(),
        scale,
        form.code,
        form.group,
        zero,
        shift,
        found,
        step=step,
        shift_step=shift_step,
    )


def _four_bits(words: torch.Tensor) -> torch.Tensor:
    """Codes (N, K) of words as bytes (N, K / 2)."""
    pairs = words.unflatten(1, (-1, 2, 2))  # of eight inputs: which of a pair, half
    both = torch.stack((pairs & 15, pairs >> 4), -1)  # which of a pair, half, pair
    return both.permute(0, 1, 3, 4, 2).flatten(1)


def _two_bits(words: torch.Tensor) -> torch.Tensor:
    """Numbers (N, K) of words as bytes (N, K / 16, 4)."""
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)
    fours = words.unflatten(2, (2, 2, 1)) >> places & 3  # which of a pair, half, pair
    return fours.permute(0, 1, 3, 4, 2).flatten(1)


def _of_groups(part: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """Scales or zero points (N, G) from blocks of 16 outputs."""
    rows, group = _of_lanes(part, packed), packed.form.group
    if group:
        rows = rows[:, :: group // packed.group][:, : -(-packed.cols // group)].contiguous()
    return rows


def _of_lanes(part: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    rows = part.view(packed.padded_rows // LANES, -1, LANES).transpose(1, 2).flatten(0, 1)
    return rows[: packed.rows].contiguous()


def unpack_stack(
    packed: PackedWeight, count: int, dtype: torch.dtype
) -> torch.Tensor | QuantisedWeight:
    """Unpack the `count` matrices of a stack from `pack_stack`."""
    found = [unpack(packed.one_of(index, count), dtype) for index in range(count)]
    first = found[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([one for one in found if isinstance(one, torch.Tensor)])
    parts = [one.tensors for one in found if not isinstance(one, torch.Tensor)]
    return first.like([torch.stack(column) for column in zip(*parts, strict=True)])


def _part(part: Bytes | None) -> Bytes:
    assert part is not None, "quantised weights have scales"
    return part
