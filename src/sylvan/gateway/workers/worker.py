"""One worker: what it serves, its health, and its load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from sylvan.config.route import BreakerConfig, HealthConfig
from sylvan.gateway.workers.breaker import CircuitBreaker
from sylvan.gateway.workers.spec import Connection, Kind, WorkerSpec
from sylvan.utils.clock import Clock


@dataclass(slots=True)
class Health:
    """Counts consecutive results of health checks.

    Attributes:
        healthy: Whether the worker gets requests.
        good: Consecutive successful checks.
        bad: Consecutive failed checks.
        checked_s: Time of the last check.
        lost_s: When it last became unhealthy.
    """

    healthy: bool = False
    good: int = 0
    bad: int = 0
    checked_s: float | None = None
    lost_s: float | None = None

    def see(self, ok: bool, now_s: float, thresholds: tuple[int, int]) -> bool:
        """Apply a check; return whether the worker's health changed.

        Args:
            ok: Whether the check succeeded.
            now_s: Time of the check.
            thresholds: Consecutive successes that make it healthy, failures that make it unhealthy.
        """
        first = self.checked_s is None
        self.checked_s = now_s
        self.good, self.bad = (self.good + 1, 0) if ok else (0, self.bad + 1)
        before = self.healthy
        successes, failures = thresholds
        if self.healthy:
            self.healthy = self.bad < failures
            if not self.healthy:
                self.lost_s = now_s
        else:
            self.healthy = ok and (first or self.good >= successes)
        return self.healthy is not before

    def lost(self, now_s: float) -> None:
        """Count the worker as unhealthy at once, whatever the thresholds."""
        self.healthy, self.good, self.lost_s = False, 0, now_s


@dataclass(slots=True)
class Discovered:
    """Properties that a worker reported.

    Attributes:
        models: Names of its models.
        journals: It accepts tickets, so other workers can continue its streams.
        capacity_tokens: Capacity of its KV cache in tokens; 0: unknown.
        dp_size: Number of its data-parallel ranks.
        version: Version of its software.
        details: Its `/model_info`.
        settings: The part of `/server_info` that says where it publishes cache events.
    """

    models: tuple[str, ...] = ()
    journals: bool = False
    capacity_tokens: int = 0
    dp_size: int = 1
    version: str = ""
    details: dict[str, object] = field(default_factory=dict[str, object])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Worker:
    """A destination of requests: a server, or one data-parallel rank of a server.

    Its load is counted by `Dispatch`, which `begin` returns.

    Attributes:
        id: ID for operators; the same in all gateways, and each time the worker is added.
        spec: Its specification.
        dp_rank: Rank of the server; None: the whole server.
        found: What it reported about itself.
        breaker: Its circuit breaker.
        health: Results of its health checks.
        draining: It finishes its requests and gets no new ones; see `drain`.
        cost: Weight of its load.
        on_change: Called when its availability may have changed.
        num_running: Unfinished requests from this process.
        queued_tokens: Uncached prompt tokens of requests from this process that it has not started
            to answer.
        foreign_load: Requests from clients other than this gateway, as it reported.
        peer_running: Requests from other processes of this gateway.
        peer_tokens: Like `queued_tokens`, of those processes.
        on_load: Called when `num_running` or `queued_tokens` changed.
        on_counts: Called when any count of its load changed, including those of others.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        clock: Clock,
        breaker: BreakerConfig | None = None,
        *,
        dp_rank: int | None = None,
    ) -> None:
        self.spec = spec
        self.dp_rank = dp_rank
        self.id = uuid5(NAMESPACE_URL, self.url).hex
        self.found = Discovered()
        self.breaker = CircuitBreaker(breaker or BreakerConfig(), clock)
        self.health = Health()
        self.draining = False
        self.num_running = 0
        self.queued_tokens = 0
        self.foreign_load = 0
        self.peer_running = 0
        self.peer_tokens = 0
        self.on_load: list[Callable[[Worker], None]] = []
        self.on_counts: list[Callable[[Worker], None]] = []
        self._peers: dict[int, tuple[int, int]] = {}
        self.cost = spec.cost
        self.clock = clock
        self.on_change: list[Callable[[Worker], None]] = []
        self.breaker.on_change.append(lambda old, new: self.changed())

    @property
    def url(self) -> str:
        """Its unique name: the address, with the rank if it is one."""
        return self.spec.url if self.dp_rank is None else f"{self.spec.url}@{self.dp_rank}"

    @property
    def kind(self) -> Kind:
        """Its kind."""
        return self.spec.worker_type

    @property
    def connection(self) -> Connection:
        """Its protocol."""
        return self.spec.connection

    @property
    def models(self) -> tuple[str, ...]:
        """Names of its models."""
        return (self.spec.model_id,) if self.spec.model_id else self.found.models

    @property
    def load(self) -> int:
        """Number of its requests, from this gateway and others."""
        return self.num_running + self.peer_running + self.foreign_load

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that it still has to compute for all processes of this gateway."""
        return self.queued_tokens + self.peer_tokens

    @property
    def weighted_load(self) -> float:
        """The load, weighted by its cost."""
        return self.load * self.cost

    @property
    def is_healthy(self) -> bool:
        """Whether it is healthy according to its checks; always, if they are disabled."""
        return self.health.healthy or self.spec.disable_health_check

    @property
    def available(self) -> bool:
        """Whether it may get a request now."""
        return self.is_healthy and not self.draining and self.breaker.allows

    def record_health(self, ok: bool, config: HealthConfig) -> bool:
        """Apply a check; return whether the worker's health changed.

        A worker that becomes healthy again starts with a closed circuit: its requests failed for
        the same reason as its checks, and often a new process answers at its address.
        """
        thresholds = (
            self.spec.health_success_threshold or config.successes,
            self.spec.health_failure_threshold or config.failures,
        )
        changed = self.health.see(ok, self.clock(), thresholds)
        if changed and self.health.healthy:
            self.breaker.reset()
        if changed:
            self.changed()
        return changed

    def record_peer_load(self, process: int, running: int, tokens: int) -> None:
        """Apply the load that another process of this gateway caused."""
        old_running, old_tokens = self._peers.pop(process, (0, 0))
        if running or tokens:
            self._peers[process] = (running, tokens)
        self.peer_running += running - old_running
        self.peer_tokens += tokens - old_tokens
        _counted(self)

    def record_foreign_load(self, requests: int) -> None:
        """Apply the number of requests from clients other than this gateway."""
        self.foreign_load = requests
        _counted(self)

    def drain(self) -> None:
        """Send it nothing more."""
        self.draining = True
        self.changed()

    def changed(self) -> None:
        """Notify subscribers that its availability may have changed."""
        for listener in self.on_change:
            listener(self)

    def begin(self, new_tokens: int = 0) -> Dispatch:
        """Count one request until the dispatch is closed.

        Args:
            new_tokens: Prompt tokens that are not cached there.
        """
        return Dispatch(self, new_tokens)

    def __repr__(self) -> str:
        return f"Worker({self.url!r})"


class Dispatch:
    """One running request at a worker. Its owner closes it in a `finally`."""

    __slots__ = ("_open", "_tokens", "_verdict", "worker")

    def __init__(self, worker: Worker, new_tokens: int) -> None:
        self.worker = worker
        self._tokens = new_tokens
        self._open = True
        self._verdict = False
        worker.num_running += 1
        worker.queued_tokens += new_tokens
        worker.breaker.sent()
        _loaded(worker)

    def answered(self) -> None:
        """The worker started to answer, so the prompt is computed."""
        if self._tokens:
            self.worker.queued_tokens -= self._tokens
            self._tokens = 0
            _loaded(self.worker)

    def succeeded(self) -> None:
        """The worker behaved correctly; rejecting a bad request counts as correct."""
        if not self._verdict:
            self._verdict = True
            self.worker.breaker.succeeded()

    def failed(self) -> None:
        """Count a failure of the worker."""
        if not self._verdict:
            self._verdict = True
            self.worker.breaker.failed()

    def close(self) -> None:
        """Mark the request as finished; closing again has no effect."""
        if not self._open:
            return
        self._open = False
        self.answered()
        self.worker.num_running -= 1
        _loaded(self.worker)
        if not self._verdict:
            self._verdict = True
            self.worker.breaker.abandoned()


def _loaded(worker: Worker) -> None:
    """Notify subscribers that the load from this gateway has changed."""
    for listener in worker.on_load:
        listener(worker)
    _counted(worker)


def _counted(worker: Worker) -> None:
    for listener in worker.on_counts:
        listener(worker)
