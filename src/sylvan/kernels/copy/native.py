"""The C++ kernels of `copy.cpp` on CPU tensors; calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch

from sylvan.kernels.copy.reference import PageBytes
from sylvan.kernels.native.binding import PagedBytes
from sylvan.kernels.native.library import Library, LibraryMissing, load


@functools.cache
def library() -> Library | None:
    """The compiled kernels, if there are any."""
    try:
        return load()
    except LibraryMissing:
        return None


def gather_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, out_NRW: torch.Tensor) -> None:
    """Implements `copy.gather_pages`, on the calling thread."""
    _dll().sylvan_gather_pages(*_pages(memory_RPW, pages_N), ctypes.c_void_p(out_NRW.data_ptr()))


def scatter_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, data_NRW: torch.Tensor) -> None:
    """Implements `copy.scatter_pages`, on the calling thread."""
    _dll().sylvan_scatter_pages(*_pages(memory_RPW, pages_N), ctypes.c_void_p(data_NRW.data_ptr()))


def copy_pages(memory_RPW: torch.Tensor, copies: Sequence[PageBytes]) -> None:
    """Implements `copy.copy_pages`, on all threads of the kernels."""
    rows = np.array(copies, np.int64).reshape(-1, 3)
    _dll().sylvan_copy_pages(ctypes.byref(_paged(memory_RPW)), rows.ctypes.data, len(rows))


def _dll() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found.dll


def _pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor) -> tuple[object, int, int]:
    return ctypes.byref(_paged(memory_RPW)), pages_N.data_ptr(), len(pages_N)


def _paged(memory_RPW: torch.Tensor) -> PagedBytes:
    regions, _, width = memory_RPW.shape
    region_step, page_step, _ = memory_RPW.stride()
    return PagedBytes(memory_RPW.data_ptr(), regions, region_step, page_step, width)
