"""One worker: what it serves, how it fares, and how busy it is."""

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
    """Outcomes of health checks in a row."""

    healthy: bool = False
    good: int = 0
    bad: int = 0
    checked_s: float | None = None

    def see(self, ok: bool, now_s: float, thresholds: tuple[int, int]) -> bool:
        """Take in a check; returns whether the worker's health changed.

        Args:
            ok: Whether the check was good.
            now_s: When it was made.
            thresholds: Good checks in a row that make it healthy, bad ones that make it unhealthy.
        """
        first = self.checked_s is None
        self.checked_s = now_s
        self.good, self.bad = (self.good + 1, 0) if ok else (0, self.bad + 1)
        before = self.healthy
        successes, failures = thresholds
        if self.healthy:
            self.healthy = self.bad < failures
        else:
            self.healthy = ok and (first or self.good >= successes)
        return self.healthy is not before


@dataclass(slots=True)
class Discovered:
    """What a worker said about itself.

    Attributes:
        models: Names of the models that it serves.
        journals: It understands tickets, so its streams can be continued elsewhere.
        capacity_tokens: Tokens that its cache holds; 0: unknown.
        dp_size: Its data-parallel ranks.
        version: Of its software.
        details: `/model_info` as it answered.
        settings: What of `/server_info` says where it publishes cache events.
    """

    models: tuple[str, ...] = ()
    journals: bool = False
    capacity_tokens: int = 0
    dp_size: int = 1
    version: str = ""
    details: dict[str, object] = field(default_factory=dict[str, object])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Worker:
    """A place that requests can go to. A data-parallel rank of a server is one, too.

    Its load is counted by `Dispatch`, which `begin` returns.

    Attributes:
        id: Its name towards operators; the same in all gateways, and each time it is added.
        spec: As it was added.
        dp_rank: Which rank of the server it stands for; None: the whole server.
        found: What it said about itself.
        breaker: Whether it keeps failing.
        health: How its checks went.
        draining: It finishes what it has and is given nothing more; see `drain`.
        cost: How much its load weighs.
        on_change: Told when it may have become available, or ceased to be.
        num_running: Requests that it was given and has not finished.
        queued_tokens: Tokens of prompts that it was given, does not hold in its cache, and has not
            begun to answer.
        foreign_load: Requests that it has from others than this gateway, as far as it told.
        peer_running: Requests that other processes of this gateway gave it.
        peer_tokens: As `queued_tokens`, of those.
        on_load: Told when `num_running` or `queued_tokens` changed.
        on_counts: Told when any count of its load changed, those of others included.
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
        """Its name among workers: the address, with the rank if it stands for one."""
        return self.spec.url if self.dp_rank is None else f"{self.spec.url}@{self.dp_rank}"

    @property
    def kind(self) -> Kind:
        """Its part in serving."""
        return self.spec.worker_type

    @property
    def connection(self) -> Connection:
        """How it is spoken to."""
        return self.spec.connection

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that it serves."""
        return (self.spec.model_id,) if self.spec.model_id else self.found.models

    @property
    def load(self) -> int:
        """Requests that it is busy with, this gateway's and others'."""
        return self.num_running + self.peer_running + self.foreign_load

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that it has yet to compute for this gateway, all its processes."""
        return self.queued_tokens + self.peer_tokens

    @property
    def weighted_load(self) -> float:
        """The load of a worker of cost 1 that is as busy."""
        return self.load * self.cost

    @property
    def is_healthy(self) -> bool:
        """Whether its checks say so; without checks it always is."""
        return self.health.healthy or self.spec.disable_health_check

    @property
    def available(self) -> bool:
        """Whether it may be given a request now."""
        return self.is_healthy and not self.draining and self.breaker.allows

    def see_health(self, ok: bool, config: HealthConfig) -> bool:
        """Take in a check; returns whether the worker's health changed.

        A worker that was unhealthy and is healthy again begins with a closed circuit: requests
        failed while its checks failed, too, and often another process answers at its address.
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

    def see_peer(self, process: int, running: int, tokens: int) -> None:
        """Take in how busy it is with requests of another process of this gateway."""
        old_running, old_tokens = self._peers.pop(process, (0, 0))
        if running or tokens:
            self._peers[process] = (running, tokens)
        self.peer_running += running - old_running
        self.peer_tokens += tokens - old_tokens
        _counted(self)

    def see_foreign(self, requests: int) -> None:
        """Take in how many requests it has from others than this gateway."""
        self.foreign_load = requests
        _counted(self)

    def drain(self) -> None:
        """Give it nothing more."""
        self.draining = True
        self.changed()

    def changed(self) -> None:
        """Notify subscribers that its availability may have changed."""
        for listener in self.on_change:
            listener(self)

    def begin(self, new_tokens: int = 0) -> Dispatch:
        """Count one request from now on until the dispatch is closed.

        Args:
            new_tokens: Tokens of its prompt that the worker does not hold.
        """
        return Dispatch(self, new_tokens)

    def __repr__(self) -> str:
        return f"Worker({self.url!r})"


class Dispatch:
    """One running request of a worker. Its holder closes it in a `finally`."""

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
        """The worker has begun to answer: the prompt is computed."""
        if self._tokens:
            self.worker.queued_tokens -= self._tokens
            self._tokens = 0
            _loaded(self.worker)

    def succeeded(self) -> None:
        """The worker did what a working one does, which may be to refuse a bad request."""
        if not self._verdict:
            self._verdict = True
            self.worker.breaker.succeeded()

    def failed(self) -> None:
        """The worker is to blame."""
        if not self._verdict:
            self._verdict = True
            self.worker.breaker.failed()

    def close(self) -> None:
        """The request is over; closing it again changes nothing."""
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
