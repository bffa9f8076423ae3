"""A pool of host buffers for pages in transit, because newly mapped memory must be faulted in.

Faulting it in takes longer than reading pages from the file cache, and would delay the first
requests of a new server.
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
"""Memory that is faulted in before its first use, at most."""


class Staging:
    """Buffers for pages of each group. Unreferenced buffers are reused.

    Args:
        memory: Page memory of each group.
        max_bytes: Size of unused buffers kept for reuse.

    Attributes:
        page_bytes: Page size of each group.
    """

    def __init__(self, memory: Sequence[PageMemory], max_bytes: int) -> None:
        self._memory, self._max_bytes = tuple(memory), max_bytes
        self.page_bytes = tuple(each.page_bytes for each in self._memory)
        self._free: list[list[Buffer]] = [[] for _ in self._memory]  # smallest first
        self._free_bytes = 0
        self._lock = threading.RLock()  # memory may be returned while some is taken

    def take(self, group: int, num_pages: int) -> Buffer:
        """Return a buffer (num_pages, page_bytes), uninitialised, while it is referenced."""
        memory = self._memory[group]
        needed = num_pages * memory.page_bytes
        with self._lock:
            free = self._free[group]
            at = next((i for i, each in enumerate(free) if each.nbytes >= needed), None)
            whole = free.pop(at) if at is not None else None
            self._free_bytes -= whole.nbytes if whole is not None else 0
        if whole is None:
            whole = memory.host_buffer(num_pages)
        # arrays made from this view reference it, not `whole`: it lives as long as they do
        found = np.frombuffer(whole.data[:needed], np.uint8)
        weakref.finalize(found, self._give, group, whole).atexit = False
        return found.reshape(num_pages, memory.page_bytes)

    def warm_up(self) -> None:
        """Fault in memory of the first group."""
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
