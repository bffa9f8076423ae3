"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy


class Fcfs:
    """Arrival order."""

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        return waiting


def build(context: PolicyContext) -> SchedulePolicy:
    return Fcfs()
