"""Recurrent states as bytes: slots are pages of one token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.memory import Checksums, Region, Transfer
from sylvan.runtime.pool.transfers import HostTransfers


class StatePages:
    """Implements `PageMemory` for recurrent states in host memory.

    An exported slot has its parts one after another, each in its tensor's layout. Transfers have no
    checksums, because stores of states compute their own.

    Args:
        parts: One contiguous tensor (S, ...) for each part of each layer.
    """

    page_size = 1

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self._transfers = HostTransfers()
        self.num_pages = len(parts[0])
        self.page_bytes = sum(part.shape[1] for part in self._parts)

    def regions(self, page: int) -> tuple[Region, ...]:
        self._check(np.array([page]))
        return tuple(
            Region(part.data_ptr() + page * part.stride(0), part.stride(0), part.shape[1])
            for part in self._parts
        )

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, _ in copies:
            self._check(np.array([source, target]))
            for part in self._parts:
                part[target] = part[source]

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        return self._transfers.host_memory(num_pages * self.page_bytes)

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        slots, rows = self._arguments(pages, buffer, checked=checksum)

        def work() -> None:
            for part, columns in self._columns(rows):
                columns.copy_(part[slots])

        return self._transfers.start(rows.numel(), work)

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        if len(np.unique(pages)) < len(pages):
            raise ValueError("an import writes each slot once")
        slots, rows = self._arguments(pages, buffer, checked=checksums is not None)

        def work() -> None:
            for part, columns in self._columns(rows):
                part[slots] = columns

        return self._transfers.start(rows.numel(), work)

    def _columns(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part, and the range of its bytes in exported slots."""
        sizes = [part.shape[1] for part in self._parts]
        return [*zip(self._parts, rows.split(sizes, dim=1), strict=True)]

    def _arguments(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots (N,), and the host memory as (N, page_bytes)."""
        self._check(pages)
        needed = len(pages) * self.page_bytes
        if checked:
            raise ValueError("states are moved without checksums")
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or buffer.nbytes < needed:
            raise ValueError(f"{len(pages)} states need a contiguous buffer of {needed} bytes")
        rows = torch.from_numpy(buffer[:needed].reshape(len(pages), self.page_bytes))
        return torch.from_numpy(pages.astype(np.int64)), rows

    def _check(self, pages: IntArray | NDArray[np.int64]) -> None:
        if pages.size and not 0 <= pages.min() <= pages.max() < self.num_pages:
            raise ValueError(f"slots {pages.tolist()} must be in 0..{self.num_pages - 1}")
