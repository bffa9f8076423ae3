"""The queue of waiting requests and its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PacingPolicy, SchedulePolicy
from sylvan.utils.clock import Clock


class WaitingQueue:
    """Orders by priority, then requests that are aged or retracted, then by the policy.

    So `age_limit_s` after its arrival, a request precedes all later arrivals of its priority, which
    bounds starvation under any policy.
    """

    def __init__(self, policy: SchedulePolicy, clock: Clock, age_limit_s: float) -> None:
        self._policy = policy
        self._clock = clock
        self._age_limit_s = age_limit_s
        self._reqs: dict[int, Req] = {}  # by arrival number
        self._priorities: Counter[int] = Counter()
        self._num_retracted = 0
        self._in_order = True

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def add(self, req: Req) -> None:
        """Queue a new or retracted request."""
        self._in_order = self._in_order and not req.retractions
        self._reqs[req.order] = req
        self._priorities[req.priority] += 1
        self._num_retracted += req.retractions > 0

    def remove(self, req: Req) -> None:
        """Remove a request that is queued."""
        del self._reqs[req.order]
        self._num_retracted -= req.retractions > 0
        self._priorities[req.priority] -= 1
        if not self._priorities[req.priority]:
            del self._priorities[req.priority]

    @property
    def highest_priority(self) -> int:
        """Highest priority of waiting requests; the queue must not be empty."""
        return max(self._priorities)

    def least_urgent(self, below: int) -> Req | None:
        """The request to drop for one of priority `below`: lowest priority, then latest arrival.

        Retracted requests are never dropped, because clients already have part of their output.
        """
        if not self._priorities or (lowest := min(self._priorities)) >= below:
            return None
        reqs = (req for req in self._reqs.values() if req.priority == lowest)
        return max(reqs, key=lambda req: (not req.retractions, req.order))

    @property
    def pacing(self) -> PacingPolicy | None:
        """The policy, if it also limits prompt tokens."""
        return self._policy if isinstance(self._policy, PacingPolicy) else None

    @property
    def any_aged(self) -> bool:
        """Whether any request precedes the policy's choice."""
        if self._num_retracted:
            return True
        oldest = next(iter(self._reqs.values()), None)  # in arrival order
        return oldest is not None and self.is_aged(oldest)

    def candidates(self) -> Iterable[Req]:
        """All waiting requests, most urgent first."""
        if not self._in_order:
            self._reqs = dict(sorted(self._reqs.items()))
            self._in_order = True
        reqs: Sequence[Req] = list(self._reqs.values())
        if len(reqs) < 2:
            return reqs
        if len(self._priorities) == 1:
            return self._ranked(reqs)
        by_priority = sorted(reqs, key=_priority, reverse=True)
        groups = [[*group] for _, group in groupby(by_priority, _priority)]
        return chain.from_iterable(map(self._ranked, groups))

    def is_aged(self, req: Req) -> bool:
        """Whether `req` precedes the policy's choice."""
        return req.retractions > 0 or self._clock() - req.arrived_s > self._age_limit_s

    def _ranked(self, reqs: Sequence[Req]) -> Iterable[Req]:
        before = self._clock() - self._age_limit_s
        if not self._num_retracted and reqs[0].arrived_s >= before:
            return self._policy.order(reqs)  # already in arrival order
        aged = [r for r in reqs if r.retractions or r.arrived_s < before]
        if len(aged) == len(reqs):
            return aged
        fresh = [r for r in reqs if not r.retractions and r.arrived_s >= before]
        return chain(aged, self._policy.order(fresh))


def _priority(req: Req) -> int:
    return req.priority
