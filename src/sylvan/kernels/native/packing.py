"""Packs and repacks rows of weights by the C++ kernels of `matmul/packing.cpp`, without the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from sylvan.kernels.matmul.pack import empty
from sylvan.kernels.matmul.packed import PackedWeight
from sylvan.kernels.matmul.weights import DENSE, PackKind, PlainRows
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.binding import PackedRows
from sylvan.kernels.native.library import Library, LibraryMissing, load

_TYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float32: 1})
_KINDS: Mapping[PackKind, int] = MappingProxyType({"dense": 0, "int8": 1, "int4": 2})


@functools.cache
def library() -> Library | None:
    """The compiled kernels, if there are any."""
    try:
        return load()
    except LibraryMissing:
        return None


def can_pack(kind: PackKind) -> bool:
    """Whether `pack_rows` takes matrices of a kind."""
    return kind in _KINDS and library() is not None


def pack_rows(rows_NK: torch.Tensor, packed: PackedWeight, first: int = 0) -> bool:
    """Overwrite outputs from `first` on of a packed matrix with unquantised numbers, rounded.

    Args:
        rows_NK: bfloat16 or float32; for a dense matrix the type that it is packed in.
        packed: Target; its padding stays unchanged; see `can_pack`.
        first: Output that the first row replaces.

    Returns: whether all numbers are finite; else the written rows are invalid.
    """
    found = library()
    assert found is not None
    count, cols = rows_NK.shape
    assert cols == packed.cols
    assert 0 <= first <= first + count <= packed.rows
    rows_NK = rows_NK.detach()
    if cols and rows_NK.stride(1) != 1:
        rows_NK = rows_NK.contiguous()
    rows = PackedRows(
        rows=rows_NK.data_ptr(),
        row_step=rows_NK.stride(0) * rows_NK.itemsize,
        count=count,
        cols=cols,
        first=first,
        words=packed.words,
        type=_TYPES[rows_NK.dtype],
        kind=_KINDS[packed.kind],
        group=packed.group,
        data=_address(packed.data),
        scale=_address(packed.scale),
        sums=_address(packed.sums),
    )
    return bool(found.dll.sylvan_pack_rows(ctypes.byref(rows)))


def repack_rows(rows_NK: torch.Tensor, packed: PackedWeight, first: int, count: int) -> bool:
    """Overwrite some outputs with new numbers, quantised to the existing form; see `can_pack`.

    Args:
        rows_NK: bfloat16 or float32; for a dense matrix the type that it is packed in.
        packed: Result of `pack` or `pack_stack`.
        first: Output that the first row replaces, counted over all matrices.
        count: Number of matrices; 1 if it is no stack.

    Returns: whether all numbers are finite; else the written rows are invalid.
    """
    finite = True
    while len(rows_NK):
        index, row = divmod(first, packed.rows)
        part = rows_NK[: packed.rows - row]
        finite &= pack_rows(part, packed.one_of(index, count), row)
        rows_NK, first = rows_NK[len(part) :], first + len(part)
    return finite


def pack_plain(plain: PlainRows, shape: torch.Size, dtype: torch.dtype) -> PackedWeight:
    """Pack a weight as `pack` and `pack_stack` do, but in parts, without a copy of the whole.

    Args:
        plain: Rows of finite numbers.
        shape: (N, K), or (E, N, K) for a stack.
        dtype: Type of the rows that kernels multiply.

    Raises:
        Unsupported: A form without a kernel.
    """
    packed, first = empty(plain.form, shape, dtype), 0
    count = shape[0] if len(shape) == 3 else 1
    for rows in plain.read():
        repack_rows(rows.to(dtype) if plain.form == DENSE else rows, packed, first, count)
        first += len(rows)
    return packed


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity, about as fast as memory is read."""
    found, size = library(), tensor.itemsize
    plain = tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if found is None or not plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return _all_finite(tensor)
    half = tensor.dtype == torch.float16
    return bool(
        found.dll.sylvan_all_finite(tensor.data_ptr(), tensor.numel() * size, size, int(half))
    )


def _all_finite(tensor: torch.Tensor) -> bool:
    """A finite sum has finite terms; otherwise check minimum and maximum."""
    if not tensor.numel() or tensor.sum().isfinite():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _address(part: Bytes | None) -> int | None:
    return None if part is None else part.ctypes.data
