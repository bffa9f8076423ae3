"""Releases pages to the system, and pauses population meanwhile."""

from __future__ import annotations

from sylvan.runtime.pool.prefault import PagePrefaulter
from sylvan.runtime.pool.releasable import ReleasableMemory


class PrefaultedMemory:
    """Wraps the `ReleasableMemory` of pages, and pauses population while they are released."""

    def __init__(self, memory: ReleasableMemory, prefaulter: PagePrefaulter) -> None:
        self._memory, self._prefaulter = memory, prefaulter

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def release(self) -> int:
        self._prefaulter.release()
        return self._memory.release()

    def resume(self) -> None:
        self._memory.resume()
        self._prefaulter.resume()
