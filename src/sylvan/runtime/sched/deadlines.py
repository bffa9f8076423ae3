"""Which requests have waited or run long enough to be ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from sylvan.runtime.core.req import Req


class Deadlines:
    """Moments at which requests are to be looked at again; those that ended stay until then.

    Attributes:
        next_s: The first of them.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._moments: list[tuple[float, int, str]] = []

    def add(self, req: Req, now_s: float, limits_s: Iterable[float | None]) -> None:
        """Look at `req` again after each of the limits that is set."""
        for seconds in limits_s:
            if seconds is not None:
                heapq.heappush(self._moments, (now_s + seconds, req.order, req.rid))
                self.next_s = self._moments[0][0]

    def due(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Arrival numbers and names whose moment has come, each once a limit."""
        while self._moments and self._moments[0][0] <= now_s:
            _, order, rid = heapq.heappop(self._moments)
            self.next_s = self._moments[0][0] if self._moments else math.inf
            yield order, rid
