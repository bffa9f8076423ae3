"""Weights in the order kernels read them: blocks of 16 outputs, a 32-bit word of inputs at a time.

Outputs are padded to a multiple of 32 and inputs to whole matrix tiles, with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight, Int4Weight, Int8Weight
from sylvan.kernels.memory import Bytes, allocate

PackKind = Literal["dense", "int8", "int4"]
LANES = 16
_OUT_PAD = 32
_BLOCK = 4096  # outputs packed at a time: bounds the temporary memory
_NATIVE_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in kernel order; `words` are 32-bit words of inputs in a block of 16 outputs."""

    kind: PackKind
    rows: int  # outputs
    cols: int  # inputs
    padded_rows: int
    words: int
    data: Bytes
    scale: Bytes | None = None
    sums: Bytes | None = None
    group: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is read when multiplying."""
        return sum(len(x) for x in (self.data, self.scale, self.sums) if x is not None)


def pack(
    weight: LinearWeight, dtype: torch.dtype, room: PackedWeight | None = None
) -> PackedWeight:
    """Pack for kernels whose rows are of `dtype` (bfloat16 or float32).

    With `room`, made for a weight of the same kind and shape, the levels are written there.

    Raises:
        Unsupported: a kind or shape without a kernel.
    """
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    if isinstance(weight, Int8Weight):
        return _pack_int8(weight, room)
    if isinstance(weight, Int4Weight):
        return _pack_int4(weight, room)
    if not isinstance(weight, torch.Tensor):
        raise Unsupported(f"a weight of type {type(weight).__name__}")
    return _pack_dense(weight.detach(), dtype, room)


def pack_stack(weight: LinearWeight, dtype: torch.dtype) -> PackedWeight:
    """Pack a stack of matrices (E, N, K), one behind the other; rows and words are of one.

    Raises:
        Unsupported: as `pack`.
    """
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    assert isinstance(weight, torch.Tensor | Int8Weight | Int4Weight)
    count = weight.shape[0]
    one = pack(weight[0], dtype)
    sizes = [None if part is None else part.nbytes for part in (one.data, one.scale, one.sums)]
    stacks = [None if size is None else allocate(count * size) for size in sizes]
    for index in range(count):
        packed = pack(weight[index], dtype) if index else one
        for part, stack in zip((packed.data, packed.scale, packed.sums), stacks, strict=True):
            if part is not None and stack is not None:
                stack[index * part.nbytes : (index + 1) * part.nbytes] = part
    assert stacks[0] is not None
    return replace(one, data=stacks[0], scale=stacks[1], sums=stacks[2])


def repack(weight: LinearWeight, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Write `weight` over one that `pack` or `pack_stack` made; programs read it from then on.

    Raises:
        Unsupported: it is of another kind or shape than what lies there.
    """
    assert isinstance(weight, torch.Tensor | Int8Weight | Int4Weight)
    count = weight.shape[0] if len(weight.shape) == 3 else 1
    parts = (packed.data, packed.scale, packed.sums)
    sizes = [None if part is None else part.nbytes // count for part in parts]
    for index in range(count):
        one = weight[index] if len(weight.shape) == 3 else weight
        where = [
            None if part is None or size is None else part[index * size : (index + 1) * size]
            for part, size in zip(parts, sizes, strict=True)
        ]
        assert where[0] is not None
        room = replace(packed, data=where[0], scale=where[1], sums=where[2])
        _check_same(one, room)
        made = pack(one, dtype, room)
        for new, old in ((made.scale, room.scale), (made.sums, room.sums)):
            if new is not None and old is not None:
                old[:] = new


def _check_same(weight: LinearWeight, packed: PackedWeight) -> None:
    kind, group = "dense", 0
    if isinstance(weight, Int8Weight):
        kind = "int8"
    elif isinstance(weight, Int4Weight):
        kind, group = "int4", weight.group
    check_packable(weight)
    found = kind, *weight.shape[-2:], group
    wanted = packed.kind, packed.rows, packed.cols, packed.group
    if wanted != found:
        raise Unsupported(
            f"a matrix {found} in the place of {wanted} (kind, outputs, inputs, group)"
        )


def check_packable(weight: LinearWeight) -> None:
    """Refuse what `pack` would; it reads nothing, so deferred weights pass.

    Raises:
        Unsupported: as `pack`.
    """
    if isinstance(weight, Int4Weight) and weight.group not in _NATIVE_GROUPS:
        raise Unsupported(f"int4 weights in groups of {weight.group}")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A copy of a tensor's bytes in kernel memory."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    out = allocate(flat.nbytes)
    out[:] = flat
    return out


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _padded(part: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the columns and rows that are missing; the matrix itself where none are."""
    rows, cols = part.shape
    below = _up(rows, _OUT_PAD) - rows
    return F.pad(part, (0, width - cols, 0, below)) if below or cols < width else part


def _blocks(words_NW: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Write int32 words of outputs first .. to their blocks. `out`: (blocks, W, 16)."""
    part = words_NW.unflatten(0, (-1, LANES)).transpose(1, 2)
    out[first // LANES : first // LANES + len(part)] = part


def _words(rows: int, words: int, room: PackedWeight | None) -> tuple[Bytes, torch.Tensor]:
    data = allocate(rows * words * 4) if room is None else room.data
    view = torch.from_numpy(data.view(np.int32)).view(rows // LANES, words, LANES)
    return data, view


def _pack_dense(
    weight: torch.Tensor, dtype: torch.dtype, room: PackedWeight | None
) -> PackedWeight:
    rows, cols = weight.shape
    padded, width = _up(rows, _OUT_PAD), _up(cols, 32)
    words = width * dtype.itemsize // 4
    data, view = _words(padded, words, room)
    for first in range(0, rows, _BLOCK):
        part = weight[first : first + _BLOCK].to(dtype)
        _blocks(_padded(part, width).contiguous().view(torch.int32), view, first)
    return PackedWeight("dense", rows, cols, padded, words, data)


def _pack_int8(weight: Int8Weight, room: PackedWeight | None) -> PackedWeight:
    rows, cols = weight.shape
    padded, width = _up(rows, _OUT_PAD), _up(cols, 64)
    data, view = _words(padded, width // 4, room)
    for first in range(0, rows, _BLOCK):
        part = _padded(weight.q[first : first + _BLOCK], width)
        _blocks(part.contiguous().view(torch.int32), view, first)
    sums = F.pad(weight.q.sum(1, dtype=torch.int32), (0, padded - rows))
    scale = F.pad(weight.scale.float(), (0, padded - rows))
    words = width // 4
    return PackedWeight("int8", rows, cols, padded, words, data, as_bytes(scale), as_bytes(sums))


def _pack_int4(weight: Int4Weight, room: PackedWeight | None) -> PackedWeight:
    rows, cols = weight.shape
    group = weight.group
    if group not in _NATIVE_GROUPS:
        raise Unsupported(f"int4 weights in groups of {group}")
    padded, width = _up(rows, _OUT_PAD), _up(cols, max(64, group))
    data, view = _words(padded, width // 8, room)
    for first in range(0, rows, _BLOCK):
        part = Int4Weight(weight.q[first : first + _BLOCK], weight.scale, group)
        levels = (part.levels() + 8).to(torch.uint8)
        missing = _up(len(levels), _OUT_PAD) - len(levels)
        levels = F.pad(levels, (0, width - cols, 0, missing), value=8)
        eights = levels.unflatten(1, (-1, 2, 4))  # of eight inputs: low nibbles, high nibbles
        packed = (eights[:, :, 0] | eights[:, :, 1] << 4).flatten(1).contiguous()
        _blocks(packed.view(torch.int32), view, first)
    scale = F.pad(weight.scale.float(), (0, (width - cols) // group, 0, padded - rows))
    scale = scale.unflatten(0, (-1, LANES)).transpose(1, 2)
    words = width // 8
    return PackedWeight(
        "int4", rows, cols, padded, words, data, as_bytes(scale.contiguous()), group=group
    )
