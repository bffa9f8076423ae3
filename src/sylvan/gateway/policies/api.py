"""The interface of routing policies: their input and output."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sylvan.config.route import RoutingConfig
from sylvan.gateway.prefixes.blocks import BlockIndex, Promise
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.worker import Worker
from sylvan.utils.clock import Clock

BYTES_PER_TOKEN = 4
"""A token of text has about four bytes, and a token ID is encoded in four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """A request as seen by routing.

    Attributes:
        prompt: Bytes such that prompts with a common prefix have a common prefix: text, or token
            IDs in four bytes each.
        namespace: Cache namespace; prompts of different namespaces share no cached prefix.
        key: Routing key of the client; "" if none.
        token_ids: Token IDs of the prompt, if known exactly.
    """

    prompt: bytes = b""
    namespace: str = ""
    key: str = ""
    token_ids: Sequence[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens, estimated if unknown."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return -(-len(self.prompt) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice of a policy.

    Attributes:
        worker: The selected worker.
        new_tokens: Prompt tokens that it must compute.
        branch: Reason of the choice, as one word for metrics.
        promise: Data of the policy until the request finishes.
    """

    worker: Worker
    new_tokens: int
    branch: str = ""
    promise: Promise | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOutcome:
    """How a placed request ended.

    Attributes:
        success: Whether the worker served it.
        prompt_tokens: Length of its prompt, as the worker reported it; 0: unknown.
        cached_tokens: How many of these were cached at the worker.
    """

    success: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RoutingPolicy:
    """Selects a worker; the other hooks do nothing by default.

    Policies do not handle health, retries or connections.
    """

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        """Select one of `workers`, which are available and not empty.

        The choice is final for this attempt, so a policy may record it at once.
        """
        raise NotImplementedError

    def completed(
        self, placement: Placement, request: RoutingRequest, outcome: PlacementOutcome
    ) -> None:
        """A request placed by this policy finished."""

    def learn(self, placement: Placement, request: RoutingRequest, at_s: float) -> None:
        """Another process of this gateway placed a request at that time."""

    def forget(self, worker: Worker) -> None:
        """Drop all state about a worker: it was removed, or restarted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyParts:
    """Dependencies of policies.

    Attributes:
        config: The routing settings.
        clock: Clock for expiry.
        ring: Hash ring of all workers, by ID.
        rng: Random source.
        blocks: Exact index of cached blocks, if cache events are followed.
    """

    config: RoutingConfig
    clock: Clock
    ring: HashRing = field(default_factory=HashRing)
    rng: random.Random = field(default_factory=random.Random)
    blocks: BlockIndex | None = None


PolicyFactory = Callable[[PolicyParts], RoutingPolicy]
"""The function `create` that each module of this package defines."""
