"""Fairness between adapters: no request waits for a slot forever.

The bound: while an adapter's requests wait for a slot or for host memory, at most
`max_overtakes` requests of other adapters start. After that, one running adapter is drained, the
one with the fewest running requests: no more of its requests start, and when they have finished,
its slot goes to the adapter that has waited longest. So the wait is bounded by that many starts,
plus the running requests of one adapter. Requests without an adapter never wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_FRESH = 2  # steps after which a waiting adapter that is not requested again is dropped


@dataclass(slots=True)
class _Waiting:
    rids: set[str] = field(default_factory=set[str])
    overtaken: int = 0
    asked: int = -_FRESH  # first step in which one of its requests could have started otherwise


class SlotQueue:
    """Decides which adapters may use a slot.

    Args:
        slots: Adapters in one step.
        max_overtakes: See above.
    """

    def __init__(self, slots: int, max_overtakes: int) -> None:
        self._slots, self._max_overtakes = slots, max_overtakes
        self._waiting: dict[str, _Waiting] = {}  # longest waiting first
        self._draining: str | None = None
        self._chosen = False  # whether `_draining` was chosen from the running requests
        self._step = 0

    @property
    def draining(self) -> str | None:
        """The adapter that is being drained: no more of its requests start."""
        return self._draining

    def next_step(self) -> None:
        """Start a step."""
        self._step += 1
        self._chosen = False

    def may_start(
        self, rid: str, adapter: str, running: Mapping[str, int], pinned: Collection[str]
    ) -> bool:
        """Whether a request may start now; if not, its adapter is queued.

        Args:
            rid: Request ID.
            adapter: Its adapter.
            running: Number of running requests of each adapter.
            pinned: Adapters that are never evicted from their slots.
        """
        if not self._chosen:
            self._choose(running, pinned)
        if adapter == self._draining:
            may = False
        elif adapter in running:
            may = True
        else:
            free = self._slots - len(running.keys() | set(pinned))
            kept = adapter in pinned  # one of those slots is its own, unless others ran before
            may = free >= 0 if kept else self._is_next(adapter, running, free)
        if not may:
            self.wait(rid, adapter)
        return may

    def wait(self, rid: str, adapter: str, *, lacks_slot: bool = True) -> None:
        """Record that a request cannot start because its adapter has no slot.

        If it lacks more than a slot, it keeps its turn but holds no slot free: only requests
        behind it may be able to free what it lacks.
        """
        waiting = self._waiting.setdefault(adapter, _Waiting())
        waiting.rids.add(rid)
        if lacks_slot:
            waiting.asked = self._step

    def started(self, rid: str, adapter: str) -> None:
        """A request started: its adapter had its turn, and others were overtaken."""
        self._chosen = False
        self._waiting.pop(adapter, None)
        for waiting in self._waiting.values():
            waiting.overtaken += 1

    def ended(self, rid: str, adapter: str) -> None:
        """A request ended, perhaps without having started."""
        waiting = self._waiting.get(adapter)
        if waiting is not None:
            waiting.rids.discard(rid)
            if not waiting.rids:
                del self._waiting[adapter]

    def _is_next(self, adapter: str, running: Mapping[str, int], free: int) -> bool:
        """Whether fewer adapters that could use a slot wait longer than there are free slots."""
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
            self._draining = None  # its slot is free
        if starving is None or starving in running or self._draining is not None:
            return
        if len(running.keys() | set(pinned)) < self._slots:
            return
        counts = Counter({a: n for a, n in running.items() if a not in pinned})
        if counts:
            self._draining = min(counts, key=lambda a: counts[a])
