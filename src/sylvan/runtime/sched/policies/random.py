"""Random order in every step: a baseline for other policies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy


class Shuffled:
    """Seeded, so that a run can be repeated."""

    def __init__(self, context: PolicyContext) -> None:
        self._random = Random(context.seed)

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        return self._random.sample(waiting, len(waiting))


def build(context: PolicyContext) -> SchedulePolicy:
    return Shuffled(context)
