"""Longest prefix match: most cached tokens first (RadixAttention, arXiv:2312.07104 s3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, islice

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import SCAN, WINDOW, PolicyContext, SchedulePolicy


class LongestPrefixMatch:
    """Requests that reuse most of the cache go first; arrival order among equals.

    To bound the cost, only the oldest `WINDOW` requests with a cached first page, among the oldest
    `SCAN`, are looked up.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._cached_tokens = context.cached_tokens
        self._likely_hits = context.likely_hits

    def order(self, waiting: Sequence[Req]) -> Iterable[Req]:
        hits = [*islice(self._likely_hits(islice(waiting, SCAN)), WINDOW)]
        if not hits:
            return waiting
        ranked = sorted(hits, key=self._cached_tokens, reverse=True)
        return chain(ranked, filterfalse(set(hits).__contains__, waiting))


def build(context: PolicyContext) -> SchedulePolicy:
    return LongestPrefixMatch(context)
