"""Releases pages to the system, and pauses population meanwhile."""

from __future__ import annotations

from sylvan.runtime.pool.ahead import PagesAhead
from sylvan.runtime.pool.occupation import Occupation


class ReleasedAhead:
    """Wraps the `Occupation` of pages, and pauses population while they are released."""

    def __init__(self, occupation: Occupation, ahead: PagesAhead) -> None:
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
