"""Maps a routing key to the same worker while that worker is available."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.worker import Worker


class ConsistentHashing(RoutingPolicy):
    """Walks the hash ring from the key to the first available worker.

    When a worker leaves, its keys spread over the others; all other keys stay. A request without a
    key goes to the least loaded worker.
    """

    def __init__(self, ring: HashRing) -> None:
        self._ring = ring

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        if not request.key:
            worker = min(workers, key=lambda worker: worker.weighted_load)
            return Placement(worker, request.num_tokens, "no_key")
        able = {worker.id: worker for worker in workers}
        for turn, worker_id in enumerate(self._ring.walk(request.key.encode())):
            if worker_id in able:
                branch = "passed_on" if turn else "own"
                return Placement(able[worker_id], request.num_tokens, branch)
        return Placement(workers[0], request.num_tokens, "off_ring")


def create(parts: PolicyParts) -> ConsistentHashing:
    return ConsistentHashing(parts.ring)
