"""Which adapter's requests may start, so that none waits for a slot forever.

The bound: while an adapter has requests that wait for a slot, or for room in host memory, at most
`max_overtakes` requests of other adapters start. After that no more requests start of one adapter
that runs, the one with the fewest running requests; when these have ended, its place goes to the
adapter that has waited longest. So it waits for so many starts, and then until the requests end
that one adapter has running. Requests without an adapter take no slot, and are never held up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_FRESH = 2  # steps within which a waiting adapter has been asked about, or nobody needs it now


@dataclass(slots=True)
class _Waiting:
    rids: set[str] = field(default_factory=set[str])
    overtaken: int = 0
    asked: int = -_FRESH  # step in which one of its requests could have started otherwise


class Turns:
    """Who may have a slot.

    Args:
        slots: Adapters in one step.
        max_overtakes: See above.
    """

    def __init__(self, slots: int, max_overtakes: int) -> None:
        self._slots, self._max_overtakes = slots, max_overtakes
        self._waiting: dict[str, _Waiting] = {}  # those that have waited longest first
        self._draining: str | None = None
        self._chosen = False  # whether `_draining` is that of the requests that run now
        self._step = 0

    @property
    def draining(self) -> str | None:
        """The adapter of which no more requests start for now."""
        return self._draining

    def next_step(self) -> None:
        """A step begins."""
        self._step += 1
        self._chosen = False

    def may_start(
        self, rid: str, adapter: str, running: Mapping[str, int], pinned: Collection[str]
    ) -> bool:
        """Whether a request may start now; it waits in line if not.

        Args:
            rid: Its name.
            adapter: Its adapter.
            running: Requests that run with each adapter.
            pinned: Adapters that never leave their slots.
        """
        if not self._chosen:
            self._choose(running, pinned)
        if adapter == self._draining:
            may = False
        elif adapter in running:
            may = True
        else:
            free = self._slots - len(running.keys() | set(pinned))
            kept = adapter in pinned  # one of those places is its own, unless others ran before
            may = free >= 0 if kept else self._is_next(adapter, running, free)
        if not may:
            self.wait(rid, adapter)
        return may

    def wait(self, rid: str, adapter: str, *, lacks_slot: bool = True) -> None:
        """A request cannot start because its adapter has no place.

        One that lacks more than a slot keeps its turn, but holds no slot free meanwhile: what it
        lacks may be given back only by those behind it.
        """
        waiting = self._waiting.setdefault(adapter, _Waiting())
        waiting.rids.add(rid)
        if lacks_slot:
            waiting.asked = self._step

    def started(self, rid: str, adapter: str) -> None:
        """A request has started: its adapter had its turn, and others were overtaken."""
        self._chosen = False
        self._waiting.pop(adapter, None)
        for waiting in self._waiting.values():
            waiting.overtaken += 1

    def ended(self, rid: str, adapter: str) -> None:
        """A request has ended, perhaps without having started."""
        waiting = self._waiting.get(adapter)
        if waiting is not None:
            waiting.rids.discard(rid)
            if not waiting.rids:
                del self._waiting[adapter]

    def _is_next(self, adapter: str, running: Mapping[str, int], free: int) -> bool:
        """Whether fewer adapters wait longer, and could have a slot now, than are free."""
        for other, waiting in self._waiting.items():
            if other == adapter or free <= 0:
                break
            if other not in running and self._step - waiting.asked < _FRESH:
                free -= 1
        return free > 0

    def _choose(self, running: Mapping[str, int], pinned: Collection[str]) -> None:
        self._chosen = True
        starving = next(
            (a for a, w in self._waiting.items() if w.overtaken >= self._max_overtakes), None
        )
        if starving is None or starving == self._draining:
            self._draining = None
        if self._draining is not None and self._draining not in running:
            self._draining = None  # its place is free
        if starving is None or starving in running or self._draining is not None:
            return
        if len(running.keys() | set(pinned)) < self._slots:
            return
        counts = Counter({a: n for a, n in running.items() if a not in pinned})
        if counts:
            self._draining = min(counts, key=lambda a: counts[a])
