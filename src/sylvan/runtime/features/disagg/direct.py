"""Pages as pieces of memory that a socket reads from, or writes to, without a copy in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.channel import Buffer

CHUNK_BYTES = 4 << 20
"""So much is checked and copied at once: the next piece is checked while this one is on its way."""
SENT_BYTES = 32 << 20
"""So much is sent at once where a socket reads it: each message takes half a millisecond."""


class PageViews:
    """Pages of one KV group as buffers.

    Where a page is one region of memory, it is looked at where it is; else it is copied.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        regions = memory.regions(0)
        self.direct = len(regions) == 1
        self._first, self._size = regions[0], memory.page_bytes

    def chunk_pages(self, *, copied: bool) -> int:
        """Pages of one message; `copied`: they go through other memory on their way."""
        most = CHUNK_BYTES if copied or not self.direct else SENT_BYTES
        return max(1, most // self._size)

    def views(self, pages: Sequence[int]) -> list[Buffer]:
        """The memory of pages, in their order; neighbours are one buffer. Only if `direct`."""
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
        """Buffers to be sent, and the checksums of the pages; blocks.

        Raises:
            OSError: they could not be read.
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
        """Whether pages that were written where they are have these checksums; blocks."""
        return checksums(self._at(page, self._size) for page in pages) == expected

    def _at(self, page: int, num_bytes: int) -> Buffer:
        address = self._first.address + page * self._first.stride
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def checksums(pages: Iterable[Buffer]) -> bytes:
    """XXH3-64 of each page, as `Pages` has them."""
    found = [xxhash.xxh3_64_intdigest(page.data) for page in pages]
    return np.array(found, "<u8").tobytes()


def split(buffer: Buffer, count: int) -> Buffer:
    """A buffer as `count` rows of equal size."""
    return buffer.reshape(count, -1) if count else buffer.reshape(0, 0)
