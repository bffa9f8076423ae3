"""Longest prefix match: most cached tokens first (RadixAttention, arXiv:2312.07104 s3)."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy


class LongestPrefixMatch:
    """Requests that reuse most of the cache go first; arrival order among equals."""

    def __init__(self, context: PolicyContext) -> None:
        self._cached_tokens = context.cached_tokens

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        """See `SchedulePolicy.order`."""
        ranked = sorted(waiting[:WINDOW], key=self._cached_tokens, reverse=True)
        return [*ranked, *waiting[WINDOW:]]


def build(context: PolicyContext) -> SchedulePolicy:
    """See `schedule_policy`."""
    return LongestPrefixMatch(context)
