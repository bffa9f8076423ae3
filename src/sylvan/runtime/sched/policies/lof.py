"""Longest output first."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy


def _output_len(req: Req) -> int:
    request = req.request
    return (request.sampling.max_new_tokens or 0) if isinstance(request, GenerateRequest) else 0


class LongestOutputFirst:
    """Requests with the highest token limit first, so that none runs alone at the end."""

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        return sorted(waiting, key=_output_len, reverse=True)


def build(context: PolicyContext) -> SchedulePolicy:
    return LongestOutputFirst()
