"""Which requests have waited or run long enough to be ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from sylvan.runtime.core.req import Req


class Deadlines:
    """A heap of times at which requests must be checked; ended requests stay in it until then."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int, str]] = []

    @property
    def next_s(self) -> float:
        """The first of them."""
        return self._moments[0][0] if self._moments else math.inf

    def add(self, req: Req, now_s: float, limits_s: Iterable[float | None]) -> None:
        """Look at `req` again after each of the limits that is set."""
        for seconds in limits_s:
            if seconds is not None:
                heapq.heappush(self._moments, (now_s + seconds, req.order, req.rid))

    def due(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Requests (arrival number, rid) whose time has come, each at most once per limit."""
        while self._moments and self._moments[0][0] <= now_s:
            _, order, rid = heapq.heappop(self._moments)
            yield order, rid
