"""Remembers evicted prefixes, to distinguish them from prefixes that were never cached."""

from __future__ import annotations

from collections import OrderedDict

MAX_GHOSTS = 65_536


class Ghosts:
    """Remembers the starts of the newest `MAX_GHOSTS` evicted runs.

    A run is identified by its namespace, position, preceding token and first page. That is less
    than the whole prefix: enough to explain a miss, but not to base decisions on.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def note(self, namespace: str, start: int, before: int, page: bytes) -> None:
        """Record that a run with this start was evicted."""
        name = hash((namespace, start, before, page))
        if name in self._seen:
            self._seen.move_to_end(name)
            return
        self._seen[name] = None
        if len(self._seen) > MAX_GHOSTS:
            self._seen.popitem(last=False)

    def known(self, namespace: str, start: int, before: int, page: bytes) -> bool:
        """Whether a run with this start was evicted."""
        return hash((namespace, start, before, page)) in self._seen
