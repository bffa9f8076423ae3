"""Policies in use: one for each model and part in serving, made when first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sylvan.gateway import policies
from sylvan.gateway.observe.families import Families
from sylvan.gateway.policies.api import (
    Placement,
    PlacementOutcome,
    PolicyParts,
    RoutingPolicy,
    RoutingRequest,
)
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Connection, Kind
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import ConfigError
from sylvan.utils.plugins import load

POLICY_LABEL = "policy"
"""Label of a worker that names the policy of its model."""


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request that a policy has placed.

    Attributes:
        placement: What it chose.
        policy: Which policy.
        request: What it was told.
    """

    placement: Placement
    policy: RoutingPolicy
    request: RoutingRequest

    @property
    def worker(self) -> Worker:
        """Who takes the request."""
        return self.placement.worker

    def completed(self, outcome: PlacementOutcome) -> None:
        """The request is over."""
        self.policy.completed(self.placement, self.request, outcome)


PlaceListener = Callable[[str, Placement, RoutingRequest], None]
"""Called with the model whose policy has placed a request, and how."""


class Placing:
    """Finds the worker for a request: candidates from the registry, the choice by policy.

    Raises:
        ConfigError: A policy that is configured does not exist.

    Attributes:
        on_place: Called with each choice of a policy.
    """

    def __init__(self, registry: Registry, parts: PolicyParts, families: Families) -> None:
        config = parts.config
        self._registry = registry
        self._parts = parts
        self._families = families
        self._names: dict[Kind, str] = {
            "regular": config.policy,
            "prefill": config.prefill_policy or config.policy,
            "decode": config.decode_policy or config.policy,
        }
        for name in self._names.values():
            load(policies, name)
        self.on_place: list[PlaceListener] = []
        self._policies: dict[tuple[str, Kind], tuple[str, RoutingPolicy]] = {}
        registry.on_remove.append(self.forget)

    @property
    def policies(self) -> Sequence[RoutingPolicy]:
        """Those in use."""
        return [policy for _, policy in self._policies.values()]

    def place(
        self,
        model: str | None,
        request: RoutingRequest,
        *,
        kind: Kind = "regular",
        connection: Connection | None = None,
        avoid: AbstractSet[str] = frozenset(),
        continuing: bool = False,
    ) -> PlacedRequest:
        """Choose a worker; see `Registry.candidates`.

        Raises:
            UnknownModelError: No worker serves the model.
            NoWorkerError: None of those that do is available.
        """
        workers = self._registry.candidates(
            model, kind, connection, avoid=avoid, continuing=continuing
        )
        served = self._registry.known_model(model) or ""
        name, policy = self._policy(served, kind, workers)
        placement = policy.select(workers, request)
        worker = placement.worker
        self._families.worker.selections.labels(
            worker.kind, worker.connection, served or "any", name
        ).inc()
        branches = self._families.policy.branches.get(name)
        if branches is not None:
            branches.labels(placement.branch).inc()
        for listener in self.on_place:
            listener(served, placement, request)
        return PlacedRequest(placement, policy, request)

    def learn(
        self, served: str, placement: Placement, request: RoutingRequest, at_s: float
    ) -> None:
        """Another process of this gateway placed a request.

        Args:
            served: Name of the model; "" if any worker would do.
            placement: What it chose.
            request: What it was told.
            at_s: When.
        """
        _, policy = self._policy(served, placement.worker.kind, [placement.worker])
        policy.learn(placement, request, at_s)

    def pin(self, worker: Worker, request: RoutingRequest) -> PlacedRequest:
        """Have a certain worker take a request."""
        served = worker.models[0] if worker.models else ""
        _, policy = self._policy(served, worker.kind, [worker])
        return PlacedRequest(Placement(worker, request.num_tokens), policy, request)

    def forget(self, worker: Worker) -> None:
        """A worker is gone, or begins anew with an empty cache."""
        for policy in self.policies:
            policy.forget(worker)

    def _policy(
        self, model: str, kind: Kind, workers: Sequence[Worker]
    ) -> tuple[str, RoutingPolicy]:
        known = self._policies.get((model, kind))
        if known is None:
            name = self._names[kind]
            hints = (worker.spec.labels.get(POLICY_LABEL) for worker in workers)
            hint = next((hint for hint in hints if hint), None)
            known = self._made(hint or name, name)
            self._policies[model, kind] = known
        return known

    def _made(self, name: str, otherwise: str) -> tuple[str, RoutingPolicy]:
        try:
            return name, load(policies, name).create(self._parts)
        except ConfigError:  # a label of a worker, which is no reason to serve nobody
            return otherwise, load(policies, otherwise).create(self._parts)
