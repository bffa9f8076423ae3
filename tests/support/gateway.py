"""Workers without servers, and a simulated cluster in virtual time."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.gateway.policies.api import (
    Placement,
    PlacementOutcome,
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
    """Return a healthy worker with the same ID in every run."""
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
    """The actual cache of a simulated worker: whole pages of prompts, evicted by LRU."""

    PAGE = 256

    def __init__(self, num_bytes: int) -> None:
        self._most = num_bytes // self.PAGE
        self._pages: dict[bytes, None] = {}

    def use(self, prompt: bytes) -> int:
        """Return the bytes of the prompt that were cached; caches all of it."""
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
    """A simulated worker: prefill in order of arrival, and concurrent decoding."""

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
        self.policy.completed(placement, request, PlacementOutcome(success=True))

    @property
    def hit_rate(self) -> float:
        """Share of prompt bytes that were cached."""
        nodes = self.nodes.values()
        return sum(n.held_bytes for n in nodes) / sum(n.seen_bytes for n in nodes)


@dataclass(slots=True)
class _Job:
    """A request at a simulated worker, with the work that is left of it, in tokens."""

    group: int
    request: RoutingRequest
    placement: Placement
    dispatch: Dispatch
    work: float = 0.0


@dataclass(slots=True)
class ClosedLoop:
    """Clients that send the next request after each answer, and workers that share processor cores.

    A worker serves one request after the other: the uncached tokens of the prompt, and `REST` for
    everything else. A token takes a millisecond of one core.
    """

    SYSTEM: ClassVar = 1024
    QUESTION: ClassVar = 64
    REST: ClassVar = 250
    CACHE: ClassVar = 8192

    policy: RoutingPolicy
    registry: Registry
    shared_cores: int
    held: dict[str, dict[int, None]] = field(default_factory=dict)
    queues: dict[str, list[_Job]] = field(default_factory=dict)
    hits: int = 0
    served: int = 0
    now_s: float = 0.0

    @classmethod
    def of(cls, name: str, num_workers: int, shared_cores: int) -> ClosedLoop:
        clock, registry = VirtualClock(), Registry()
        loop = cls(make_policy(name, registry, clock), registry, shared_cores)
        for number in range(num_workers):
            worker = make_worker(number, clock)
            registry.add(worker)
            loop.held[worker.id], loop.queues[worker.id] = {}, []
        return loop

    def run(self, groups: int, per_group: int, num_clients: int, seed: int = 0) -> None:
        """Serve `per_group` requests of each group, in a mixed order."""
        rng = random.Random(seed)
        asked = [group for group in range(groups) for _ in range(per_group)]
        rng.shuffle(asked)
        waiting = [(group, self._request(group, rng)) for group in asked]
        for _ in range(num_clients):
            self._submit(waiting)
        while busy := [queue for queue in self.queues.values() if queue]:
            first = min(busy, key=lambda queue: queue[0].work)
            done = first[0].work
            rate = min(1.0, self.shared_cores / len(busy))
            self.now_s += done / rate / 1000
            for queue in busy:
                queue[0].work -= done
            self._finish(first)
            self._submit(waiting)

    def _submit(self, waiting: list[tuple[int, RoutingRequest]]) -> None:
        if not waiting:
            return
        group, request = waiting.pop()
        placement = self.policy.select(self.registry.candidates("m"), request)
        dispatch = placement.worker.begin(placement.new_tokens)
        queue = self.queues[placement.worker.id]
        queue.append(_Job(group, request, placement, dispatch))
        if len(queue) == 1:
            self._begin(queue[0])

    def _begin(self, job: _Job) -> None:
        held = self.held[job.placement.worker.id]
        hit = job.group in held
        held.pop(job.group, None)
        held[job.group] = None
        while len(held) * (self.SYSTEM + self.QUESTION) > self.CACHE:
            del held[next(iter(held))]
        self.hits += self.SYSTEM * hit
        self.served += 1
        job.work = self.REST + self.QUESTION + self.SYSTEM * (not hit)

    def _finish(self, queue: list[_Job]) -> None:
        job = queue.pop(0)
        job.dispatch.close()
        self.policy.completed(job.placement, job.request, PlacementOutcome(success=True))
        if queue:
            self._begin(queue[0])

    def _request(self, group: int, rng: random.Random) -> RoutingRequest:
        system = random.Random(group).choices(range(3, 200), k=self.SYSTEM)
        ids = [*system, *rng.choices(range(3, 200), k=self.QUESTION)]
        return RoutingRequest(prompt=array("i", ids).tobytes(), token_ids=ids)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.hits / (self.served * (self.SYSTEM + self.QUESTION))

    @property
    def requests_per_s(self) -> float:
        return self.served / self.now_s
