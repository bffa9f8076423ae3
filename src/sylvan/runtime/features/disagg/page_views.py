"""Gives sockets direct access to the memory of pages, without copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.channel import Buffer

CHUNK_BYTES = 4 << 20
"""Bytes checksummed and copied at once: the next piece is checksummed while this one is sent."""
SENT_BYTES = 32 << 20
"""Bytes sent at once if the socket reads them in place: each message costs half a millisecond."""


class PageViews:
    """Pages of one KV group as buffers.

    A page that is one memory region is accessed in place; otherwise it is copied.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        regions = memory.regions(0)
        self.direct = len(regions) == 1
        self._first, self._size = regions[0], memory.page_bytes

    def chunk_pages(self, *, copied: bool) -> int:
        """Return the pages per message; `copied`: they go through an intermediate buffer."""
        limit = CHUNK_BYTES if copied or not self.direct else SENT_BYTES
        return max(1, limit // self._size)

    def views(self, pages: Sequence[int]) -> list[Buffer]:
        """Return the memory of pages, in order, with adjacent pages joined. Only if `direct`."""
        found: list[Buffer] = []
        start = 0
        while start < len(pages):
            stop = start + 1
            if self._first.stride == self._size:
                while stop < len(pages) and pages[stop] == pages[stop - 1] + 1:
                    stop += 1
            found.append(self._at(pages[start], (stop - start) * self._size))
            start = stop
        return found

    def read(self, pages: Sequence[int]) -> tuple[list[Buffer], bytes]:
        """Return buffers to send, and the checksums of the pages; blocks.

        Raises:
            OSError: The pages could not be read.
        """
        if self.direct:
            return self.views(pages), checksums(self._at(page, self._size) for page in pages)
        buffer = self._memory.host_buffer(len(pages))
        transfer = self._memory.export(np.array(pages, np.int32), buffer)
        transfer.wait()
        if transfer.error:
            raise OSError(transfer.error)
        whole = buffer[: len(pages) * self._size]
        return [whole], checksums(whole.reshape(len(pages), -1))

    def hold(self, pages: Sequence[int], expected: bytes) -> bool:
        """Whether pages written in place have these checksums; blocks."""
        return checksums(self._at(page, self._size) for page in pages) == expected

    def _at(self, page: int, num_bytes: int) -> Buffer:
        address = self._first.address + page * self._first.stride
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def checksums(pages: Iterable[Buffer]) -> bytes:
    """Return the XXH3-64 of each page, as in `Pages`."""
    found = [xxhash.xxh3_64_intdigest(page.data) for page in pages]
    return np.array(found, "<u8").tobytes()


def split(buffer: Buffer, count: int) -> Buffer:
    """Split a buffer into `count` rows of equal size."""
    return buffer.reshape(count, -1) if count else buffer.reshape(0, 0)
