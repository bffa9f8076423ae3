"""Prometheus gauges of the workers, read at scrape time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sylvan.gateway.observe.metrics import PREFIX
from sylvan.gateway.placement import RequestPlacer
from sylvan.gateway.policies.manual import Manual
from sylvan.gateway.workers.breaker import BreakerState
from sylvan.gateway.workers.registry import Registry
from sylvan.utils.clock import Clock

_STATES = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}
AGES = (30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400)
"""Upper bounds of the buckets for ages of in-flight requests, in seconds."""


class WorkerGauges(Collector):
    """Gauges of the worker registry and of the policies."""

    def __init__(self, registry: Registry, placing: RequestPlacer) -> None:
        self._registry = registry
        self._placing = placing

    def collect(self) -> Iterator[Metric]:
        yield from self._pool()
        yield from self._each()
        manual = [p for p in self._placing.policies if isinstance(p, Manual)]
        entries = GaugeMetricFamily(
            PREFIX + "manual_policy_cache_entries", "Routing keys that the policy remembers"
        )
        entries.add_metric([], sum(policy.num_keys for policy in manual))
        yield entries
        keys = GaugeMetricFamily(
            PREFIX + "worker_routing_keys_active",
            "Routing keys assigned to a worker",
            labels=["worker"],
        )
        for worker in self._registry.workers:
            keys.add_metric([worker.url], sum(policy.keys_of(worker) for policy in manual))
        yield keys

    def _pool(self) -> Iterator[Metric]:
        sizes: Counter[tuple[str, str, str]] = Counter()
        connections: Counter[tuple[str, str]] = Counter()
        for worker in self._registry.workers:
            for model in worker.models or ("unknown",):
                sizes[worker.kind, worker.connection, model] += 1
            connections[worker.kind, worker.connection] += worker.num_running
        labels = ["worker_type", "connection_mode", "model_id"]
        size = GaugeMetricFamily(
            PREFIX + "worker_pool_size", "Workers known to the gateway", labels=labels
        )
        for values, count in sizes.items():
            size.add_metric(values, count)
        yield size
        active = GaugeMetricFamily(
            PREFIX + "worker_connections_active",
            "Requests being answered by workers",
            labels=labels[:2],
        )
        for values, count in connections.items():
            active.add_metric(values, count)
        yield active

    def _each(self) -> Iterator[Metric]:
        values = {
            "requests_active": "Requests being answered by a worker",
            "health": "1 if the worker is healthy",
            "cb_state": "State of the circuit breaker: 0 closed, 1 open, 2 half-open",
            "cb_consecutive_failures": "Consecutive failures of a worker",
            "cb_consecutive_successes": "Consecutive successes of a worker",
        }
        families = {
            name: GaugeMetricFamily(PREFIX + "worker_" + name, doc, labels=["worker"])
            for name, doc in values.items()
        }
        for worker in self._registry.workers:
            breaker = worker.breaker
            for name, value in (
                ("requests_active", worker.num_running),
                ("health", int(worker.is_healthy)),
                ("cb_state", _STATES[breaker.state]),
                ("cb_consecutive_failures", breaker.failures),
                ("cb_consecutive_successes", breaker.successes),
            ):
                families[name].add_metric([worker.url], value)
        yield from families.values()


class InflightAges(Collector):
    """Histogram of the ages of in-flight requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: dict[object, float] = {}

    def enter(self, request: object) -> None:
        """Count a new request."""
        self._began[request] = self._clock()

    def leave(self, request: object) -> None:
        """Count a finished request."""
        self._began.pop(request, None)

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        ages = [now - began for began in self._began.values()]
        family = GaugeMetricFamily(
            PREFIX + "http_inflight_request_age_count",
            "Requests being answered whose age is at most `le` seconds",
            labels=["le"],
        )
        for bound in AGES:
            family.add_metric([str(bound)], sum(age <= bound for age in ages))
        family.add_metric(["+Inf"], len(ages))
        yield family
