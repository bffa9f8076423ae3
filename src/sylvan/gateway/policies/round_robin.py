"""Selects workers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker


class RoundRobin(RoutingPolicy):
    """Cycles through the available workers."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        worker = workers[self._turn % len(workers)]
        self._turn += 1
        return Placement(worker, request.num_tokens)


def create(parts: PolicyParts) -> RoundRobin:
    return RoundRobin()
