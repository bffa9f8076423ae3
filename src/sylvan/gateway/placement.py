"""Applies routing policies: one per model and worker kind, created on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.gateway.observe.metrics import GatewayMetrics
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
"""Worker label that names the policy of its model."""


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request that was placed on a worker.

    Attributes:
        placement: The choice.
        policy: The policy that chose.
        request: The policy's input.
    """

    placement: Placement
    policy: RoutingPolicy
    request: RoutingRequest

    @property
    def worker(self) -> Worker:
        """The selected worker."""
        return self.placement.worker

    def completed(self, outcome: PlacementOutcome) -> None:
        """Tell the policy that the request finished."""
        self.policy.completed(self.placement, self.request, outcome)


PlaceListener = Callable[[str, Placement, RoutingRequest], None]
"""Called with the model whose policy placed a request, and the placement."""


class RequestPlacer:
    """Selects the worker of a request: the registry lists candidates, the policy chooses.

    Raises:
        ConfigError: A configured policy does not exist.

    Attributes:
        on_place: Called with each placement.
    """

    def __init__(self, registry: Registry, parts: PolicyParts, metrics: GatewayMetrics) -> None:
        self._registry = registry
        self._parts = parts
        self._metrics = metrics
        self._names = _names(parts.config)
        self.on_place: list[PlaceListener] = []
        self._policies: dict[tuple[str, Kind], tuple[str, RoutingPolicy]] = {}
        registry.on_remove.append(self.forget)

    def prepare(self, config: RoutingConfig) -> Callable[[], None]:
        """Check other settings; the result makes them those of later requests.

        Requests under way stay with the policies that placed them. The new ones know nothing yet.

        Raises:
            ConfigError: A policy does not exist.
        """
        names = _names(config)

        def take() -> None:
            if config != self._parts.config:
                self._parts = replace(self._parts, config=config)
                self._names = names
                self._policies.clear()

        return take

    @property
    def policies(self) -> Sequence[RoutingPolicy]:
        """The policies in use."""
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
        """Select a worker; see `Registry.candidates`.

        Raises:
            UnknownModelError: No worker serves the model.
            NoWorkerError: No worker that serves the model is available.
        """
        workers = self._registry.candidates(
            model, kind, connection, avoid=avoid, continuing=continuing
        )
        served = self._registry.known_model(model) or ""
        name, policy = self._policy(served, kind, workers)
        placement = policy.select(workers, request)
        worker = placement.worker
        self._metrics.worker.selections.labels(
            worker.kind, worker.connection, served or "any", name
        ).inc()
        branches = self._metrics.policy.branches.get(name)
        if branches is not None:
            branches.labels(placement.branch).inc()
        for listener in self.on_place:
            listener(served, placement, request)
        return PlacedRequest(placement, policy, request)

    def learn(
        self, served: str, placement: Placement, request: RoutingRequest, at_s: float
    ) -> None:
        """Tell a policy that another process of this gateway placed a request.

        Args:
            served: Model name; "" if any worker will do.
            placement: The choice.
            request: The policy's input.
            at_s: Time of the placement.
        """
        _, policy = self._policy(served, placement.worker.kind, [placement.worker])
        policy.learn(placement, request, at_s)

    def pin(self, worker: Worker, request: RoutingRequest) -> PlacedRequest:
        """Place a request on a given worker."""
        served = worker.models[0] if worker.models else ""
        _, policy = self._policy(served, worker.kind, [worker])
        return PlacedRequest(Placement(worker, request.num_tokens), policy, request)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that was removed, or restarted with an empty cache."""
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
        except ConfigError:  # an unknown policy in a label must not stop requests
            return otherwise, load(policies, otherwise).create(self._parts)


def _names(config: RoutingConfig) -> Mapping[Kind, str]:
    names: dict[Kind, str] = {
        "regular": config.policy,
        "prefill": config.prefill_policy or config.policy,
        "decode": config.decode_policy or config.policy,
    }
    for name in names.values():
        load(policies, name)
    return names
