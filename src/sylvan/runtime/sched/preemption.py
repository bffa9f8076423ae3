"""Chooses the running request to preempt when KV memory is short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sylvan.runtime.core.req import Req, Slice

_priority = attrgetter("priority")


class Preemption:
    """Chooses victims among requests without a slice in the step being planned.

    Args:
        running: The live list of running requests.
        threshold: Minimum priority difference for preemption; None disables it.
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
        """Return the least urgent, newest request that `urgent` may preempt, or None."""
        threshold = self._threshold
        if threshold is None:
            return None
        less = [r for r in self._without(slices) if urgent.priority - r.priority >= threshold]
        return min(less, key=lambda r: (r.priority, -r.order), default=None)

    def _without(self, slices: Iterable[Slice]) -> list[Req]:
        busy = {piece.req.order for piece in slices}
        return [req for req in self._running if req.order not in busy]
