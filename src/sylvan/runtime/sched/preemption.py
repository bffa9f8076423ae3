"""Which running request loses its memory, where there is too little for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sylvan.runtime.core.req import Req, Slice

_priority = attrgetter("priority")


class Preemption:
    """Chooses victims, none of which has a slice in the step being planned.

    Args:
        running: The requests that run, as they are now.
        threshold: Least difference of priorities at which one preempts another; None: never.
    """

    def __init__(self, running: Sequence[Req], threshold: int | None) -> None:
        self._running, self._threshold = running, threshold

    def victim(self, slices: Iterable[Slice]) -> Req:
        """Where memory ran out: least urgent, then fewest outputs, longest prompt, newest."""
        free = self._without(slices)
        return min(free, key=lambda r: (r.priority, r.num_outputs, -r.prompt_len, -r.order))

    def is_possible(self, priority: int) -> bool:
        """Whether a request of that priority may preempt any running one."""
        if self._threshold is None or not self._running:
            return False
        return priority - min(map(_priority, self._running)) >= self._threshold

    def victim_of(self, urgent: Req, slices: Iterable[Slice]) -> Req | None:
        """The least urgent and newest that `urgent` may preempt; None: there is none."""
        threshold = self._threshold
        if threshold is None:
            return None
        less = [r for r in self._without(slices) if urgent.priority - r.priority >= threshold]
        return min(less, key=lambda r: (r.priority, -r.order), default=None)

    def _without(self, slices: Iterable[Slice]) -> list[Req]:
        busy = {piece.req.order for piece in slices}
        return [req for req in self._running if req.order not in busy]
