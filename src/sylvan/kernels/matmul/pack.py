"""Packs weights into kernel order: blocks of 16 outputs, one 32-bit word of inputs at a time.

Outputs are zero-padded to a multiple of 32, and inputs to whole matrix tiles.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight, Unsupported
from sylvan.kernels.matmul.codes import bits_of, packed_bits_of
from sylvan.kernels.matmul.packed import LANES, PackedWeight
from sylvan.kernels.matmul.weights import (
    DENSE,
    CodedWeight,
    DeferredWeight,
    Form,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
)
from sylvan.kernels.memory import Bytes, allocate

_OUT_PAD = 32
_BLOCK = 4096  # outputs packed at a time: bounds the temporary memory
_NATIVE_GROUPS = (32, 64, 128)


def pack(
    weight: LinearWeight, dtype: torch.dtype, target: PackedWeight | None = None
) -> PackedWeight:
    """Pack for kernels whose rows are of `dtype` (bfloat16 or float32).

    With `target`, an earlier result for the same kind and shape, overwrite that.

    Raises:
        Unsupported: a kind or shape without a kernel.
    """
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    if isinstance(weight, Int8Weight):
        return _pack_int8(weight, target)
    if isinstance(weight, Int4Weight):
        return _pack_int4(weight, target)
    if isinstance(weight, CodedWeight):
        return _pack_coded(weight, target)
    if not isinstance(weight, torch.Tensor):
        raise Unsupported(f"a weight of type {type(weight).__name__}")
    return _pack_dense(weight.detach(), dtype, target)


def pack_stack(weight: LinearWeight, dtype: torch.dtype) -> PackedWeight:
    """Pack a stack of matrices (E, N, K) one after another; `rows` and `words` are per matrix.

    Raises:
        Unsupported: as `pack`.
    """
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    assert isinstance(weight, torch.Tensor | QuantisedWeight)
    count = weight.shape[0]
    one = pack(weight[0], dtype)
    stack = replace(one, **{name: allocate(count * p.nbytes) for name, p in one.parts.items()})
    for name, part in one.parts.items():
        stack.parts[name][: part.nbytes] = part
    for index in range(1, count):
        pack(weight[index], dtype, stack.one_of(index, count))
    return stack


def empty(form: Form, shape: torch.Size, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """A weight of zeros as `pack` and `pack_stack` lay it out, for a form other than codes.

    `dtype`: of the numbers of a dense weight.

    Raises:
        Unsupported: a form without a kernel.
    """
    _check_group(form)
    *stack, rows, cols = shape
    count, padded, group = math.prod(stack), _up(rows, _OUT_PAD), form.group
    if form.kind == "dense":
        words = _up(cols, 32) * dtype.itemsize // 4
        data = allocate(count * padded * words * 4)
        return PackedWeight("dense", rows, cols, padded, words, data)
    width = _up(cols, max(64, group))
    words = width // (4 if form.kind == "int8" else 8)
    scales = padded * (width // group if group else 1)
    data, scale = allocate(count * padded * words * 4), allocate(count * scales * 4)
    if form.kind == "int8":
        sums = allocate(count * padded * 4)
        return PackedWeight("int8", rows, cols, padded, words, data, scale, sums, form=form)
    data[:] = 0x88  # level 8 stands for zero
    return PackedWeight("int4", rows, cols, padded, words, data, scale, group=group, form=form)


def repack(weight: LinearWeight, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Overwrite a result of `pack` or `pack_stack` with `weight`; programs then use the new one.

    Raises:
        Unsupported: Kind or shape differ.
    """
    assert isinstance(weight, torch.Tensor | QuantisedWeight)
    stacked = len(weight.shape) == 3
    count = weight.shape[0] if stacked else 1
    for index in range(count):
        one = weight[index] if stacked else weight
        target = packed.one_of(index, count)
        _check_same(one, target)
        pack(one, dtype, target)


def _check_same(weight: torch.Tensor | QuantisedWeight, packed: PackedWeight) -> None:
    check_packable(weight)
    found = form_of(weight), *weight.shape[-2:]
    wanted = packed.form, packed.rows, packed.cols
    if wanted != found:
        described = (f"{form}, {rows} x {cols}" for form, rows, cols in (found, wanted))
        raise Unsupported(f"a matrix of {' in the place of one of '.join(described)}")


def form_of(weight: torch.Tensor | QuantisedWeight) -> Form:
    """Storage form of a weight's contents."""
    return weight.form if isinstance(weight, QuantisedWeight) else DENSE


def check_packable(weight: LinearWeight) -> None:
    """Raise for weights that `pack` does not support; reads no data, so deferred weights pass.

    Raises:
        Unsupported: as `pack`.
    """
    if isinstance(weight, QuantisedWeight):
        _check_group(weight.form)
    if isinstance(weight, CodedWeight):
        _chunk(weight)


def _check_group(form: Form) -> None:
    if form.kind == "int4" and form.group not in _NATIVE_GROUPS:
        raise Unsupported(f"int4 weights in groups of {form.group}")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A copy of a tensor's bytes in kernel memory."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    out = allocate(flat.nbytes)
    out[:] = flat
    return out


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _padded(part: torch.Tensor, width: int) -> torch.Tensor:
    """Zero-pad columns and rows; return the matrix itself if no padding is needed."""
    rows, cols = part.shape
    below = _up(rows, _OUT_PAD) - rows
    return F.pad(part, (0, width - cols, 0, below)) if below or cols < width else part


def _blocks(words_NW: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Write int32 words of outputs first .. to their blocks. `out`: (blocks, W, 16)."""
    part = words_NW.unflatten(0, (-1, LANES)).transpose(1, 2)
    out[first // LANES : first // LANES + len(part)] = part


def _words(packed: PackedWeight) -> torch.Tensor:
    """The data of one matrix. Shape: (blocks, W, 16), int32."""
    return torch.from_numpy(packed.data.view(np.int32)).view(-1, packed.words, LANES)


def _write(part: Bytes | None, values: torch.Tensor) -> None:
    """Overwrite an array, or its beginning where padding follows."""
    assert part is not None
    flat = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    part[: len(flat)] = flat


def _pack_dense(
    weight: torch.Tensor, dtype: torch.dtype, target: PackedWeight | None
) -> PackedWeight:
    packed = target or empty(DENSE, weight.shape, dtype)
    width, view = packed.words * 4 // dtype.itemsize, _words(packed)
    for first in range(0, packed.rows, _BLOCK):
        part = weight[first : first + _BLOCK].to(dtype)
        _blocks(_padded(part, width).contiguous().view(torch.int32), view, first)
    return packed


def _pack_int8(weight: Int8Weight, target: PackedWeight | None) -> PackedWeight:
    packed = target or empty(weight.form, weight.shape)
    view = _words(packed)
    for first in range(0, packed.rows, _BLOCK):
        part = _padded(weight.q[first : first + _BLOCK], packed.words * 4)
        _blocks(part.contiguous().view(torch.int32), view, first)
    _write(packed.scale, weight.scale.float())
    _write(packed.sums, weight.q.sum(1, dtype=torch.int32))
    return packed


def _pack_int4(weight: Int4Weight, target: PackedWeight | None) -> PackedWeight:
    packed = target or empty(weight.form, weight.shape)
    (rows, cols), group = weight.shape, weight.group
    width, view = packed.words * 8, _words(packed)
    for first in range(0, rows, _BLOCK):
        part = Int4Weight(weight.q[first : first + _BLOCK], weight.scale, group)
        levels = (part.levels() + 8).to(torch.uint8)
        missing = _up(len(levels), _OUT_PAD) - len(levels)
        levels = F.pad(levels, (0, width - cols, 0, missing), value=8)
        eights = levels.unflatten(1, (-1, 2, 4))  # of eight inputs: low nibbles, high nibbles
        words = (eights[:, :, 0] | eights[:, :, 1] << 4).flatten(1).contiguous()
        _blocks(words.view(torch.int32), view, first)
    padding = (0, (width - cols) // group, 0, packed.padded_rows - rows)
    scale = F.pad(weight.scale.float(), padding)
    _write(packed.scale, scale.unflatten(0, (-1, LANES)).transpose(1, 2))
    return packed


def _chunk(weight: CodedWeight) -> int:
    """Inputs that the kernel sums before scaling: a group, or an equal part of one."""
    if weight.code == "int6" and weight.zero is not None:
        raise Unsupported("codes of 6 bits with zero points")
    width, group = _up(weight.shape[-1], 32), weight.group
    for size in (*reversed(_NATIVE_GROUPS), 16):
        if width % size == 0 and group % size == 0:
            return size
    raise Unsupported(f"{weight.code} weights of {weight.shape[-1]} inputs in groups of {group}")


def _pack_coded(weight: CodedWeight, target: PackedWeight | None) -> PackedWeight:
    rows, cols = weight.shape
    chunk, stored, bits = _chunk(weight), bits_of(weight.code), packed_bits_of(weight.code)
    padded, width = _up(rows, _OUT_PAD), _up(cols, 32)
    found = {"scale": weight.scale, "zeros": weight.zero, "shifts": weight.shift}
    parts = {
        name: _by_lanes(_by_chunk(part, weight, chunk), padded)
        for name, part in found.items()
        if part is not None
    }
    if weight.step is not None:
        parts["steps"] = _by_lanes(_steps(weight), padded)
    if weight.order is not None:
        parts["order"] = weight.order.int()
    if target is None:
        words = width * bits // 32
        arrays = {name: allocate(part.nbytes) for name, part in parts.items()}
        data = allocate(padded * words * 4)
        form = weight.form
        target = PackedWeight(
            "coded", rows, cols, padded, words, data, group=chunk, form=form, **arrays
        )
    view = _words(target)
    for first in range(0, rows, _BLOCK):
        part = _padded(weight.q[first : first + _BLOCK], width * stored // 8)
        _blocks(_WORDS[bits](part), view, first)
    for name, part in parts.items():
        _write(target.parts[name], part)
    return target


def _by_chunk(part: torch.Tensor, weight: CodedWeight, chunk: int) -> torch.Tensor:
    """Scales or zero points (N, chunks); one chunk for row scales."""
    if not weight.group:
        return part
    starts = torch.arange(0, _up(weight.shape[1], 32), chunk)
    return part[:, (starts // weight.group).clamp(max=part.shape[1] - 1)]


def _steps(weight: CodedWeight) -> torch.Tensor:
    """Steps of each superblock: that of its scales, then that of its shifts if there are any."""
    assert weight.step is not None
    if weight.shift_step is None:
        return weight.step
    return torch.stack((weight.step, weight.shift_step), -1).flatten(-2)


def _by_lanes(part: torch.Tensor, padded: int) -> torch.Tensor:
    """Numbers (N, G) in kernel order: (blocks, G, 16)."""
    part = F.pad(part, (0, 0, 0, padded - len(part)))
    return part.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _paired_nibbles(q: torch.Tensor) -> torch.Tensor:
    """Words of eight inputs, input 2i as nibble i and 2i + 1 as nibble i + 4."""
    words = _exchanged(q.contiguous().view(torch.int32), 4, 0x00F000F0)  # 1 and 2, 5 and 6
    return _exchanged(words, 8, 0x0000FF00)  # the middle bytes


def _paired_bytes(q: torch.Tensor) -> torch.Tensor:
    """Words of four inputs, input 2i as byte i and 2i + 1 as byte i + 2."""
    return _exchanged(q.contiguous().view(torch.int32), 8, 0x0000FF00)


def _exchanged(words: torch.Tensor, distance: int, mask: int) -> torch.Tensor:
    """Exchange the bits of `mask` with those `distance` higher."""
    changed = (words >> distance).bitwise_xor_(words).bitwise_and_(mask)
    words = words ^ changed
    return words.bitwise_xor_(changed.bitwise_left_shift_(distance))


def _paired_sixes(q: torch.Tensor) -> torch.Tensor:
    """Three words of sixteen inputs: two with their low four bits, one with their high two.

    In the third, those of input 2i are bits 2i and 2i + 1, and those of input 2i + 1 are 16 higher.
    """
    eights = q.contiguous().view(torch.int64)
    low = _gathered(eights, 4) | _gathered(eights >> 8, 4) << 16
    high = _gathered(eights >> 4, 2) | _gathered(eights >> 12, 2) << 16
    high = high[:, ::2] | high[:, 1::2] << 8
    words = torch.empty(len(q), high.shape[1], 3, dtype=torch.int32)
    words[..., :2] = low.view(torch.int32)[:, ::2].unflatten(1, (-1, 2))
    words[..., 2] = high.view(torch.int32)[:, ::2]
    return words.flatten(1)


def _gathered(eights: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest bits of bytes 0, 2, 4 and 6, one after another."""
    pair = (1 << 2 * bits) - 1
    found = eights & ((1 << bits) - 1) * 0x0001000100010001
    found |= found >> 16 - bits
    found &= pair | pair << 32
    found |= found >> 32 - 2 * bits
    return found.bitwise_and_((1 << 4 * bits) - 1)


_WORDS = {4: _paired_nibbles, 6: _paired_sixes, 8: _paired_bytes}
