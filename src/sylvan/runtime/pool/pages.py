"""Bytes of pages in one buffer: regions, copies within it, transfers to and from the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from sylvan.kernels.copy import copy_pages, gather_pages, scatter_pages
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.memory import Checksums, Region, Transfer
from sylvan.runtime.pool.transfers import ChecksumError, HostTransfers, Transfers


class PagedBuffer:
    """Implements `PageMemory` over one tensor of bytes.

    Args:
        memory_RPW: uint8 (R, P, W): the contiguous bytes of page p in region r. The first
            dimensions may have any strides; a pool with contiguous pages has one region.
        page_size: Tokens of a page.
        whole_pages: Whether copies of tokens must copy the whole page, because the first tokens of
            a page are not the first bytes of its regions.
        transfers: Runs exports and imports; None: a thread, for host memory.

    Checksums are XXH3-64 by the library `xxhash`, which is as fast as a copy; zlib's CRC-32 takes
    several times as long. 64 bits suffice for the number of pages.
    """

    def __init__(
        self,
        memory_RPW: torch.Tensor,
        page_size: int,
        *,
        whole_pages: bool = False,
        transfers: Transfers | None = None,
    ) -> None:
        self._memory = memory_RPW
        regions, self.num_pages, width = memory_RPW.shape
        self.page_size = page_size
        self.page_bytes = regions * width
        self._whole = whole_pages
        if transfers is None and memory_RPW.device.type == "cpu":
            transfers = HostTransfers()
        self._transfers = transfers

    @property
    def memory(self) -> torch.Tensor:
        """All bytes: uint8 (R, P, W)."""
        return self._memory

    def regions(self, page: int) -> tuple[Region, ...]:
        self._check(np.array([page]))
        count, _, width = self._memory.shape
        region_step, stride, _ = self._memory.stride()
        first = self._memory.data_ptr() + page * stride
        return tuple(Region(first + r * region_step, stride, width) for r in range(count))

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if not copies:
            return
        given = np.array(copies, np.int64)
        self._check(given[:, :2])
        if ((given[:, 2] < 0) | (given[:, 2] > self.page_size)).any():
            raise ValueError(
                f"copies of {given[:, 2].tolist()} tokens: pages have {self.page_size}"
            )
        each = self._memory.shape[2] // self.page_size
        copy_pages(
            self._memory,
            [
                (source, target, each * (self.page_size if self._whole else num_tokens))
                for source, target, num_tokens in copies
            ],
        )

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        return self.through.host_memory(num_pages * self.page_bytes)

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        if not buffer.flags.writeable:
            raise ValueError("the host buffer of an export is read-only")
        pages_N, host_NRW = self._arguments(pages, buffer)

        def work(_: object = buffer) -> None:  # keeps the buffer alive
            gather_pages(self._memory, pages_N, host_NRW)

        return self.through.start(
            host_NRW.numel(),
            work,
            hashes=(lambda: checksums_of(buffer, self.page_bytes, len(pages)))
            if checksum
            else None,
        )

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        check = check_of_import(pages, buffer, self.page_bytes, checksums)
        pages_N, host_NRW = self._arguments(pages, buffer)

        def work(_: object = buffer) -> None:
            scatter_pages(self._memory, pages_N, host_NRW)

        return self.through.start(host_NRW.numel(), work, check=check)

    def _arguments(
        self, pages: IntArray, buffer: NDArray[np.uint8]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers (N,), and the host memory as (N, R, W)."""
        self._check(pages)
        regions, _, width = self._memory.shape
        host, through = host_bytes(buffer, len(pages), self.page_bytes), self.through
        if not through.suits(host):
            raise ValueError("host memory must be pinned; allocate it with host_buffer")
        numbers = through.host_memory(8 * len(pages)).view(np.int64)
        numbers[:] = pages
        return torch.from_numpy(numbers), host.view(len(pages), regions, width)

    def _check(self, pages: NDArray[np.integer[Any]]) -> None:
        if pages.size and not 0 <= pages.min() <= pages.max() < self.num_pages:
            raise ValueError(f"pages {pages.tolist()} must be in 0..{self.num_pages - 1}")

    @property
    def through(self) -> Transfers:
        """Return the object that runs exports and imports.

        Raises:
            ValueError: There is none.
        """
        if self._transfers is None:
            raise ValueError("this pool cannot transfer pages to the host")
        return self._transfers


class JoinedPages:
    """Implements `PageMemory` over several host buffers; a page has a part in each.

    Args:
        parts: The buffers, which share page numbers; the smallest limits the number of pages.
    """

    def __init__(self, parts: Sequence[PagedBuffer]) -> None:
        self._parts = parts
        self.num_pages = min(part.num_pages for part in parts)
        self.page_size = parts[0].page_size
        self.page_bytes = sum(part.page_bytes for part in parts)

    def regions(self, page: int) -> tuple[Region, ...]:
        return tuple(region for part in self._parts for region in part.regions(page))

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for part in self._parts:
            part.copy_tokens(copies)

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        return np.empty(num_pages * self.page_bytes, np.uint8)

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        if not buffer.flags.writeable:
            raise ValueError("the host buffer of an export is read-only")
        places = self._places(pages, buffer)

        def work(_: object = buffer) -> None:
            for memory_RW, host_RW in places:
                host_RW.copy_(memory_RW)

        return self._parts[0].through.start(
            len(pages) * self.page_bytes,
            work,
            hashes=(lambda: checksums_of(buffer, self.page_bytes, len(pages)))
            if checksum
            else None,
        )

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        check = check_of_import(pages, buffer, self.page_bytes, checksums)
        places = self._places(pages, buffer)

        def work(_: object = buffer) -> None:
            for memory_RW, host_RW in places:
                memory_RW.copy_(host_RW)

        return self._parts[0].through.start(len(pages) * self.page_bytes, work, check=check)

    def _places(
        self, pages: IntArray, buffer: NDArray[np.uint8]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part, and its range in the host memory of a page."""
        if pages.size and not 0 <= pages.min() <= pages.max() < self.num_pages:
            raise ValueError(f"pages {pages.tolist()} must be in 0..{self.num_pages - 1}")
        host_NB = host_bytes(buffer, len(pages), self.page_bytes).view(len(pages), -1)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for part in self._parts:
            stop = start + part.page_bytes
            for page, host_B in zip(pages.tolist(), host_NB, strict=True):
                memory_RW = part.memory[:, page]
                found.append((memory_RW, host_B[start:stop].view(memory_RW.shape)))
            start = stop
        return found


def check_of_import(
    pages: IntArray, buffer: NDArray[np.uint8], page_bytes: int, checksums: Checksums | None
) -> Callable[[], None] | None:
    """Return the checksums to verify before writing pages; None: no verification.

    Raises:
        ValueError: a page is repeated, or the number of checksums differs.
    """
    if len(np.unique(pages)) < len(pages):
        raise ValueError("an import writes each page once")
    if checksums is None:
        return None
    if len(checksums) != len(pages):
        raise ValueError(f"{len(checksums)} checksums for {len(pages)} pages")

    def check() -> None:
        found = checksums_of(buffer, page_bytes, len(pages))
        if wrong := np.flatnonzero(found != checksums).tolist():
            raise ChecksumError(f"checksums of pages {wrong} of {len(pages)} are wrong")

    return check


def host_bytes(buffer: NDArray[np.uint8], count: int, page_bytes: int) -> torch.Tensor:
    """View host memory as bytes of that many pages.

    Raises:
        ValueError: too small, or not contiguous bytes.
    """
    needed = count * page_bytes
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError("a host buffer must be contiguous and of type uint8")
    if buffer.nbytes < needed:
        raise ValueError(f"{count} pages are {needed} bytes; the buffer has {buffer.nbytes}")
    return _tensor(buffer, needed)


def _tensor(buffer: NDArray[np.uint8], num_bytes: int) -> torch.Tensor:
    """View the first bytes of host memory, which may be read-only; does not keep it alive."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    at = (ctypes.c_char * num_bytes).from_address(buffer.ctypes.data)
    return torch.frombuffer(at, dtype=torch.uint8)


def checksums_of(buffer: NDArray[np.uint8], page_bytes: int, count: int) -> Checksums:
    """Checksums of the first pages of host memory."""
    whole = buffer.data.cast("B")
    pages = (whole[i * page_bytes : (i + 1) * page_bytes] for i in range(count))
    return np.fromiter((xxhash.xxh3_64_intdigest(page) for page in pages), np.uint64, count)
