"""Shortest prefill first: fewest tokens to compute before the first output."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy


class ShortestPrefill:
    """Shortest remaining processing time of the prompt, counting cached tokens as done."""

    def __init__(self, context: PolicyContext) -> None:
        self._cached_tokens = context.cached_tokens

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        def uncached(req: Req) -> int:
            return req.num_tokens - self._cached_tokens(req)

        return [*sorted(waiting[:WINDOW], key=uncached), *waiting[WINDOW:]]


def build(context: PolicyContext) -> SchedulePolicy:
    return ShortestPrefill(context)
