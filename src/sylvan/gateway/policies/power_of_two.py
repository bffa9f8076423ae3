"""Selects the less loaded of two random workers (Mitzenmacher, 2001)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker


class PowerOfTwo(RoutingPolicy):
    """Two choices keep the largest load near the mean without scanning all workers."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        pair = self._rng.sample(workers, 2) if len(workers) > 1 else workers
        worker = min(pair, key=lambda worker: worker.weighted_load)
        return Placement(worker, request.num_tokens)


def create(parts: PolicyParts) -> PowerOfTwo:
    return PowerOfTwo(parts.rng)
