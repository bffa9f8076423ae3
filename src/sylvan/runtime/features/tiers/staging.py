"""Host memory through which pages pass, used again: memory that is new has to be made resident.

That takes longer than reading pages from the system's file cache, and a server that starts would
have its first requests wait for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sylvan.runtime.core.memory import PageMemory

Buffer = NDArray[np.uint8]
FIRST_BYTES = 64 << 20
"""Of memory that is made resident ahead of the first use, at most."""


class Staging:
    """Buffers for pages of each group. What nobody refers to any more is given out again.

    Args:
        memory: Of each group.
        max_bytes: Of buffers that are kept for later.

    Attributes:
        page_bytes: Of each group.
    """

    def __init__(self, memory: Sequence[PageMemory], max_bytes: int) -> None:
        self._memory, self._max_bytes = tuple(memory), max_bytes
        self.page_bytes = tuple(each.page_bytes for each in self._memory)
        self._free: list[list[Buffer]] = [[] for _ in self._memory]  # smallest first
        self._free_bytes = 0
        self._lock = threading.RLock()  # memory may be given back while some is taken

    def take(self, group: int, num_pages: int) -> Buffer:
        """Memory (num_pages, page_bytes) with anything in it, for as long as it is referred to."""
        memory = self._memory[group]
        needed = num_pages * memory.page_bytes
        with self._lock:
            free = self._free[group]
            at = next((i for i, each in enumerate(free) if each.nbytes >= needed), None)
            whole = free.pop(at) if at is not None else None
            self._free_bytes -= whole.nbytes if whole is not None else 0
        if whole is None:
            whole = memory.host_buffer(num_pages)
        # arrays made of this one refer to it, and not to `whole`: it lives as long as they do
        found = np.frombuffer(whole.data[:needed], np.uint8)
        weakref.finalize(found, self._give, group, whole).atexit = False
        return found.reshape(num_pages, memory.page_bytes)

    def warm_up(self) -> None:
        """Make memory of the first group resident."""
        memory = self._memory[0]
        count = min(FIRST_BYTES, self._max_bytes) // memory.page_bytes
        if count:
            self.take(0, min(count, memory.num_pages)).fill(0)

    def _give(self, group: int, whole: Buffer) -> None:
        with self._lock:
            if self._free_bytes + whole.nbytes > self._max_bytes:
                return
            self._free_bytes += whole.nbytes
            self._free[group].append(whole)
            self._free[group].sort(key=lambda each: each.nbytes)
