"""Workers without servers, and a cluster of them in virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.gateway.policies.api import (
    Outcome,
    Placement,
    PolicyParts,
    RoutingPolicy,
    RoutingRequest,
)
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Dispatch, Worker
from sylvan.utils.clock import Clock, VirtualClock
from sylvan.utils.plugins import load


def make_worker(number: int, clock: Clock, **spec: object) -> Worker:
    """A healthy worker with an id that is the same in every run."""
    worker = Worker(WorkerSpec(url=f"http://w{number}:80", **spec), clock)  # type: ignore[arg-type]
    worker.id = f"{number:032x}"
    worker.found.models = ("m",)
    worker.health.healthy = True
    return worker


def make_policy(
    name: str, registry: Registry | None = None, clock: Clock | None = None, **config: object
) -> RoutingPolicy:
    parts = PolicyParts(
        config=RoutingConfig(**config),  # type: ignore[arg-type]
        clock=clock or VirtualClock(),
        ring=(registry or Registry()).ring,
        rng=random.Random(7),
    )
    return load(policies, name).create(parts)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    prompt: bytes
    key: str = ""


class LruCache:
    """What a simulated worker really holds: whole pages of prompts, the least recently used go."""

    PAGE = 256

    def __init__(self, num_bytes: int) -> None:
        self._most = num_bytes // self.PAGE
        self._pages: dict[bytes, None] = {}

    def use(self, prompt: bytes) -> int:
        """Bytes of the prompt that were held; holds all of it from now on."""
        ends = range(self.PAGE, len(prompt) + 1, self.PAGE)
        prefixes = [prompt[:end] for end in ends]
        held = 0
        for prefix in prefixes:
            if prefix not in self._pages:
                break
            held = len(prefix)
        for prefix in reversed(prefixes):  # the start of a prompt goes last
            self._pages.pop(prefix, None)
            self._pages[prefix] = None
        while len(self._pages) > self._most:
            del self._pages[next(iter(self._pages))]
        return held


@dataclass(slots=True)
class Node:
    """A simulated worker: prefill in order of arrival, then decoding beside it."""

    worker: Worker
    cache: LruCache
    free_s: float = 0.0
    served: int = 0
    held_bytes: int = 0
    seen_bytes: int = 0


@dataclass(slots=True)
class Cluster:
    """Workers in virtual time, driven by the real registry and policy.

    Attributes:
        prefill_s: Seconds to compute a byte of prompt.
        decode_s: Seconds from the first token to the last.
        watch: Called after each choice.
    """

    policy: RoutingPolicy
    registry: Registry
    clock: VirtualClock
    cache_bytes: int = 1 << 20
    prefill_s: float = 1e-5
    decode_s: float = 0.5
    watch: Callable[[Cluster, Placement, RoutingRequest], None] | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    first_token_s: list[float] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def of(cls, name: str, num_workers: int, **changes: object) -> Cluster:
        clock, registry = VirtualClock(), Registry()
        config = changes.pop("config", {})
        policy = make_policy(name, registry, clock, **config)  # type: ignore[arg-type]
        cluster = cls(policy, registry, clock, **changes)  # type: ignore[arg-type]
        registry.on_remove.append(policy.forget)
        for number in range(num_workers):
            cluster.join(make_worker(number, clock))
        return cluster

    def join(self, worker: Worker) -> None:
        self.registry.add(worker)
        self.nodes[worker.id] = Node(worker, LruCache(self.cache_bytes))

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._numbers), action))

    def run(self, trace: Iterable[Arrival]) -> None:
        """Play a trace to its end."""
        for arrival in trace:
            self.at(arrival.at_s, lambda arrival=arrival: self._arrive(arrival))
        while self._events:
            when_s, _, action = heappop(self._events)
            self.clock.advance(max(0.0, when_s - self.clock()))
            action()

    def _arrive(self, arrival: Arrival) -> None:
        request = RoutingRequest(prompt=arrival.prompt, key=arrival.key)
        able: Sequence[Worker] = self.registry.candidates("m")
        placement = self.policy.select(able, request)
        if self.watch is not None:
            self.watch(self, placement, request)
        dispatch = placement.worker.begin(placement.new_tokens)
        node = self.nodes[placement.worker.id]
        held = node.cache.use(arrival.prompt)
        node.served += 1
        node.held_bytes += held
        node.seen_bytes += len(arrival.prompt)
        now = self.clock()
        node.free_s = max(now, node.free_s) + (len(arrival.prompt) - held) * self.prefill_s
        self.first_token_s.append(node.free_s - now)
        self.at(node.free_s, dispatch.answered)
        self.at(node.free_s + self.decode_s, lambda: self._end(placement, request, dispatch))

    def _end(self, placement: Placement, request: RoutingRequest, dispatch: Dispatch) -> None:
        dispatch.close()
        self.policy.completed(placement, request, Outcome(success=True))

    @property
    def hit_rate(self) -> float:
        """Share of the bytes of prompts that were held."""
        nodes = self.nodes.values()
        return sum(n.held_bytes for n in nodes) / sum(n.seen_bytes for n in nodes)
