"""What was cached once: tells evicted prefixes from those never seen."""

from __future__ import annotations

from collections import OrderedDict

MAX_GHOSTS = 65_536


class Ghosts:
    """Remembers where evicted runs began, the newest `MAX_GHOSTS` of them.

    A run is known by its namespace, position, the token before it and its first page. That is less
    than the whole prefix: enough to explain a miss, not to decide anything.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def note(self, namespace: str, start: int, before: int, page: bytes) -> None:
        """A run that began here was evicted."""
        name = hash((namespace, start, before, page))
        if name in self._seen:
            self._seen.move_to_end(name)
            return
        self._seen[name] = None
        if len(self._seen) > MAX_GHOSTS:
            self._seen.popitem(last=False)

    def known(self, namespace: str, start: int, before: int, page: bytes) -> bool:
        """Whether such a run was evicted."""
        return hash((namespace, start, before, page)) in self._seen
