"""Weights back out of the order kernels read them: exactly what was packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sylvan.kernels.matmul.pack import LANES, PackedWeight
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight
from sylvan.kernels.memory import Bytes


def unpack(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor | Int8Weight | Int4Weight:
    """The matrix that was packed for rows of `dtype`; new tensors."""
    words = torch.from_numpy(packed.data.view(np.int32)).view(-1, packed.words, LANES)
    levels = words.transpose(1, 2).reshape(packed.padded_rows, packed.words).contiguous()
    if packed.kind == "dense":
        return levels.view(dtype)[: packed.rows, : packed.cols].clone()
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


def unpack_stack(
    packed: PackedWeight, count: int, dtype: torch.dtype
) -> torch.Tensor | Int8Weight | Int4Weight:
    """The `count` matrices that `pack_stack` packed."""
    found = [unpack(_one(packed, index, count), dtype) for index in range(count)]
    first = found[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([one for one in found if isinstance(one, torch.Tensor)])
    q = torch.stack([one.q for one in found if not isinstance(one, torch.Tensor)])
    scale = torch.stack([one.scale for one in found if not isinstance(one, torch.Tensor)])
    return (
        Int8Weight(q, scale) if isinstance(first, Int8Weight) else Int4Weight(q, scale, first.group)
    )


def _one(packed: PackedWeight, index: int, count: int) -> PackedWeight:
    parts: list[Bytes | None] = []
    for part in (packed.data, packed.scale, packed.sums):
        size = 0 if part is None else part.nbytes // count
        parts.append(None if part is None else part[index * size : (index + 1) * size])
    assert parts[0] is not None
    return replace(packed, data=parts[0], scale=parts[1], sums=parts[2])


def _part(part: Bytes | None) -> Bytes:
    assert part is not None, "quantised weights have scales"
    return part
