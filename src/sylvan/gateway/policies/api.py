"""What a routing policy is given, and what it answers."""

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
"""A token of text has about four bytes, and an id is written in four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """What is known of a request before it is sent.

    Attributes:
        prompt: Bytes whose common prefixes are common prefixes of prompts: text, or token ids in
            four bytes each.
        namespace: Prompts of different namespaces share nothing in a cache.
        key: Routing key that the client gave; "" if none.
        token_ids: The prompt, where it is known exactly.
    """

    prompt: bytes = b""
    namespace: str = ""
    key: str = ""
    token_ids: Sequence[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, or a guess."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return -(-len(self.prompt) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice of a policy.

    Attributes:
        worker: Who takes the request.
        new_tokens: Tokens of the prompt that it must compute.
        branch: Why it was chosen, in one word for metrics.
        promise: Kept by the policy until the request is over.
    """

    worker: Worker
    new_tokens: int
    branch: str = ""
    promise: Promise | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOutcome:
    """How a placed request ended.

    Attributes:
        success: The worker served it.
        prompt_tokens: Tokens of its prompt, as the worker counted them; 0: unknown.
        cached_tokens: Those of them that the worker held.
    """

    success: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RoutingPolicy:
    """Chooses a worker; the other hooks do nothing unless overridden.

    Knows nothing of health, retries or connections.
    """

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        """Choose one of `workers`, which are available and not empty.

        The choice is final for this attempt: a policy may take it into account at once.
        """
        raise NotImplementedError

    def completed(
        self, placement: Placement, request: RoutingRequest, outcome: PlacementOutcome
    ) -> None:
        """A request that this policy placed is over."""

    def learn(self, placement: Placement, request: RoutingRequest, at_s: float) -> None:
        """Another process of this gateway placed a request, at that time."""

    def forget(self, worker: Worker) -> None:
        """Nothing that was placed there counts any more: the worker is gone, or begins anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyParts:
    """What policies are made from.

    Attributes:
        config: The settings of routing.
        clock: For what gets old.
        ring: All workers, by id.
        rng: For choices at random.
        blocks: What workers say that they hold, if they are followed.
    """

    config: RoutingConfig
    clock: Clock
    ring: HashRing = field(default_factory=HashRing)
    rng: random.Random = field(default_factory=random.Random)
    blocks: BlockIndex | None = None


PolicyFactory = Callable[[PolicyParts], RoutingPolicy]
"""What each module of this package defines as `create`."""
