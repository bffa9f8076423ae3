"""Highest response ratio next: (waited + service) / service, service being the uncached prompt."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy

TOKENS_PER_SECOND = 2000.0  # converts prompt tokens to seconds; only the magnitude matters


class HighestResponseRatioNext:
    """Short prompts first, but waiting raises everyone's rank (Brinch Hansen, 1971)."""

    def __init__(self, context: PolicyContext) -> None:
        self._cached_tokens = context.cached_tokens
        self._clock = context.clock

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        now = self._clock()

        def ratio(req: Req) -> float:
            service = max(1, req.num_tokens - self._cached_tokens(req)) / TOKENS_PER_SECOND
            return (now - req.arrived_s) / service

        return [*sorted(waiting[:WINDOW], key=ratio, reverse=True), *waiting[WINDOW:]]


def build(context: PolicyContext) -> SchedulePolicy:
    return HighestResponseRatioNext(context)
