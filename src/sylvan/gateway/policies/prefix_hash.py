"""Hashes the start of the prompt to a worker, unless that would overload it."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.gateway.policies.api import (
    BYTES_PER_TOKEN,
    Placement,
    PolicyParts,
    RoutingPolicy,
    RoutingRequest,
)
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.worker import Worker


class PrefixHash(RoutingPolicy):
    """Consistent hashing with bounded loads (arXiv:1608.01350) over the first tokens of a prompt.

    Skips a worker whose load would exceed `load_factor` times the mean, so a popular prefix spreads
    over as many workers as it needs.
    """

    def __init__(self, ring: HashRing, prefix_tokens: int, load_factor: float) -> None:
        self._ring = ring
        self._prefix_bytes = prefix_tokens * BYTES_PER_TOKEN
        self._load_factor = load_factor

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        able = {worker.id: worker for worker in workers}
        total = sum(worker.weighted_load for worker in workers)
        most = self._load_factor * (total + 1) / len(workers)
        key = request.namespace.encode() + b"\0" + request.prompt[: self._prefix_bytes]
        for turn, worker_id in enumerate(self._ring.walk(key)):
            worker = able.get(worker_id)
            if worker is not None and worker.weighted_load < most:
                return Placement(worker, request.num_tokens, "passed_on" if turn else "own")
        worker = min(workers, key=lambda worker: worker.weighted_load)
        return Placement(worker, request.num_tokens, "overloaded")


def create(parts: PolicyParts) -> PrefixHash:
    return PrefixHash(parts.ring, parts.config.prefix_tokens, parts.config.load_factor)
