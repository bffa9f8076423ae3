"""Selects a worker with equal probability."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker


class Uniform(RoutingPolicy):
    """Selects uniformly at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        return Placement(self._rng.choice(workers), request.num_tokens)


def create(parts: PolicyParts) -> Uniform:
    return Uniform(parts.rng)
