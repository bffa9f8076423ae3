"""Releases pages to the system, and pauses population meanwhile."""

from __future__ import annotations

from sylvan.runtime.pool.prefault import PagePrefaulter
from sylvan.runtime.pool.releasable import ReleasableMemory


class PrefaultedMemory:
    """Wraps the `ReleasableMemory` of pages, and pauses population while they are released."""

    def __init__(self, occupation: ReleasableMemory, ahead: PagePrefaulter) -> None:
        self._occupation, self._ahead = occupation, ahead

    @property
    def num_bytes(self) -> int:
        return self._occupation.num_bytes

    def release(self) -> int:
        self._ahead.release()
        return self._occupation.release()

    def resume(self) -> None:
        self._occupation.resume()
        self._ahead.resume()
