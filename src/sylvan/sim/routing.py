"""Routes requests to replicas with the gateway's real policies and worker load counts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.gateway.policies.api import (
    Placement,
    PlacementOutcome,
    PolicyParts,
    RoutingPolicy,
    RoutingRequest,
)
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Dispatch, Worker
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.workload import Ids
from sylvan.utils.plugins import load


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request in flight.

    Attributes:
        replica: Its replica.
        dispatch: Counts as load of that worker until it is closed.
        placement: The policy's choice.
        request: The policy's input.
    """

    replica: int
    dispatch: Dispatch
    placement: Placement
    request: RoutingRequest


class SimulatedRouter:
    """The gateway's choice of a worker, without connections.

    Args:
        config: Routing policy and its settings.
        replicas: Number of workers.
        cache_tokens: Cache size of each.
        clock: Clock of the gateway.
        seed: Seed of random policies.

    Raises:
        ConfigError: There is no policy of that name.
    """

    def __init__(
        self,
        config: RoutingConfig,
        replicas: int,
        cache_tokens: int,
        clock: ReplicaClock,
        seed: int,
    ) -> None:
        self._clock = clock
        ring = HashRing()
        self._workers: list[Worker] = []
        self._numbers: dict[str, int] = {}
        for number in range(replicas):
            spec = WorkerSpec(url=f"http://replica-{number}:1", disable_health_check=True)
            worker = Worker(spec, clock)
            worker.found.capacity_tokens = cache_tokens
            ring.add(worker.id)
            self._workers.append(worker)
            self._numbers[worker.id] = number
        parts = PolicyParts(config=config, clock=clock, ring=ring, rng=random.Random(seed))
        self._policy: RoutingPolicy = load(policies, config.policy).create(parts)

    def send(self, ids: Ids, now_s: float, key: str = "") -> RoutedRequest:
        """Select the replica of a request.

        Args:
            ids: Its prompt.
            now_s: Its arrival time; never decreases.
            key: Routing key; identifies its conversation.
        """
        self._clock.reach(now_s)
        request = RoutingRequest(prompt=ids.tobytes(), key=key, token_ids=ids.data)
        placement = self._policy.select(self._workers, request)
        dispatch = placement.worker.begin(placement.new_tokens)
        return RoutedRequest(self._numbers[placement.worker.id], dispatch, placement, request)

    def ended(
        self, sent: RoutedRequest, *, success: bool, prompt: int, cached: int, now_s: float
    ) -> None:
        """A request finished."""
        self._clock.reach(now_s)
        if success:
            sent.dispatch.succeeded()
        sent.dispatch.close()
        outcome = PlacementOutcome(success=success, prompt_tokens=prompt, cached_tokens=cached)
        self._policy.completed(sent.placement, sent.request, outcome)
