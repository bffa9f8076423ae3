"""Copies KV pages: to and from host memory, and their leading bytes into other pages.

Shapes: R regions, P pages, W bytes of a page in one region, N copied pages. Memory (R, P, W) is
uint8 on any device; the bytes of a page in a region are contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from sylvan.kernels.copy import native, reference
from sylvan.kernels.copy.reference import PageBytes
from sylvan.kernels.gpu.choice import kernels_for

__all__ = ["PageBytes", "copy_pages", "gather_pages", "scatter_pages"]


def gather_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, out_NRW: torch.Tensor) -> None:
    """Copy pages out of `memory_RPW`, one after another.

    On a GPU this is one launch in the current stream, which does not wait.

    Args:
        memory_RPW: The pool.
        pages_N: int64, in host memory; pin it for a pool on a device, else the call may wait.
        out_NRW: uint8, contiguous, in host memory; pin it for a pool on a device.
    """
    _found(memory_RPW).gather_pages(memory_RPW, pages_N, out_NRW)


def scatter_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, data_NRW: torch.Tensor) -> None:
    """The reverse of `gather_pages`; page numbers must be distinct."""
    _found(memory_RPW).scatter_pages(memory_RPW, pages_N, data_NRW)


def copy_pages(memory_RPW: torch.Tensor, copies: Sequence[PageBytes]) -> None:
    """Copy leading bytes of pages into other pages, in each region; the result is sequential."""
    _found(memory_RPW).copy_pages(memory_RPW, copies)


class _Copies(Protocol):
    """A module that implements all three."""

    def gather_pages(
        self, memory_RPW: torch.Tensor, pages_N: torch.Tensor, out_NRW: torch.Tensor
    ) -> None: ...

    def scatter_pages(
        self, memory_RPW: torch.Tensor, pages_N: torch.Tensor, data_NRW: torch.Tensor
    ) -> None: ...

    def copy_pages(self, memory_RPW: torch.Tensor, copies: Sequence[PageBytes]) -> None: ...


def _found(memory_RPW: torch.Tensor) -> _Copies:
    if (kernels := _kernels(memory_RPW.device)) is not None:
        return kernels
    if memory_RPW.device.type == "cpu" and native.library() is not None:
        return native
    return reference


@functools.cache
def _kernels(device: torch.device) -> _Copies | None:
    return cast("_Copies | None", kernels_for("copy", device))
