"""Binds a routing key to the worker that it was first assigned to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker

MAX_KEYS = 1_000_000

Assignment = Callable[[Sequence[Worker]], Worker]


@dataclass(slots=True)
class _Sticky:
    worker_id: str
    assigned_s: float
    used_s: float


class Manual(RoutingPolicy):
    """Remembers the worker of each key until the key expires.

    A key whose worker is unavailable is reassigned. A request without a key is placed like a new
    key, but not remembered.

    Attributes:
        num_keys: Number of remembered keys.
    """

    def __init__(self, parts: PolicyParts) -> None:
        self._clock = parts.clock
        self._max_idle_s = parts.config.max_idle_s
        self._keys: OrderedDict[str, _Sticky] = OrderedDict()  # least recently used first
        self._groups: Counter[str] = Counter()
        ways: dict[str, Assignment] = {
            "random": parts.rng.choice,
            "min_load": lambda workers: min(workers, key=lambda w: w.weighted_load),
            "min_group": lambda workers: min(workers, key=lambda w: self._groups[w.id]),
        }
        self._assign = ways[parts.config.assignment]

    @property
    def num_keys(self) -> int:
        """Number of remembered keys."""
        return len(self._keys)

    def keys_of(self, worker: Worker) -> int:
        """Number of keys assigned to a worker."""
        return self._groups[worker.id]

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        now = self._clock()
        self._expire(now)
        if not request.key:
            return Placement(self._assign(workers), request.num_tokens, "no_key")
        known = self._keys.get(request.key)
        if known is not None:
            for worker in workers:
                if worker.id == known.worker_id:
                    known.used_s = now
                    self._keys.move_to_end(request.key)
                    return Placement(worker, request.num_tokens, "sticky")
            self._drop(request.key)
        worker = self._assign(workers)
        self._keep(request.key, worker, now)
        return Placement(worker, request.num_tokens, "new" if known is None else "moved")

    def learn(self, placement: Placement, request: RoutingRequest, at_s: float) -> None:
        """Apply another process's assignment; the later of two assignments wins."""
        known = self._keys.get(request.key)
        if placement.branch == "sticky":
            if known is not None and known.worker_id == placement.worker.id:
                known.used_s = max(known.used_s, at_s)
                self._keys.move_to_end(request.key)
        elif request.key and (known is None or known.assigned_s < at_s):
            if known is not None:
                self._drop(request.key)
            self._keep(request.key, placement.worker, at_s)

    def forget(self, worker: Worker) -> None:
        for key in [k for k, sticky in self._keys.items() if sticky.worker_id == worker.id]:
            self._drop(key)

    def _keep(self, key: str, worker: Worker, now: float) -> None:
        self._keys[key] = _Sticky(worker.id, now, now)
        self._groups[worker.id] += 1
        if len(self._keys) > MAX_KEYS:
            self._drop(next(iter(self._keys)))

    def _expire(self, now: float) -> None:
        while self._keys:
            key, sticky = next(iter(self._keys.items()))
            if now - sticky.used_s <= self._max_idle_s:
                return
            self._drop(key)

    def _drop(self, key: str) -> None:
        sticky = self._keys.pop(key)
        self._groups[sticky.worker_id] -= 1


def create(parts: PolicyParts) -> Manual:
    return Manual(parts)
