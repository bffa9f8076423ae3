"""Names and labels of all metrics: those of SGLang's gateway, and a few additions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

PREFIX = "smg_"
OWN_PREFIX = "sylvan_gateway_"
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0),
)
"""Upper bounds of the duration buckets, in seconds."""

_ROUTER = ("router_type", "backend_type", "connection_mode", "model_id", "endpoint")


class Labelled(Generic[Metric]):
    """A labelled metric whose children are found without the library's checks and lock.

    Each request updates a dozen metrics.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def labels(self, *values: str) -> Metric:
        """Return the child with these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class MetricMaker:
    """Creates metrics in one registry."""

    def __init__(self, registry: CollectorRegistry, buckets: Sequence[float] = ()) -> None:
        self.registry = registry
        self._buckets = tuple(buckets) or DURATIONS

    def total(self, name: str, doc: str) -> Counter:
        """Make a counter."""
        return Counter(name, doc, registry=self.registry)

    def level(self, name: str, doc: str) -> Gauge:
        """Make a gauge."""
        return Gauge(name, doc, registry=self.registry)

    def counter(self, name: str, doc: str, *labels: str) -> Labelled[Counter]:
        """Make a labelled counter."""
        return Labelled(Counter(name, doc, labels, registry=self.registry))

    def gauge(self, name: str, doc: str, *labels: str) -> Labelled[Gauge]:
        """Make a labelled gauge."""
        return Labelled(Gauge(name, doc, labels, registry=self.registry))

    def seconds(self, name: str, doc: str, *labels: str) -> Labelled[Histogram]:
        """Make a labelled histogram of durations."""
        histogram = Histogram(name, doc, labels, buckets=self._buckets, registry=self.registry)
        return Labelled(histogram)


class HttpMetrics:
    """Metrics of clients' requests."""

    def __init__(self, make: MetricMaker) -> None:
        name = PREFIX + "http_"
        self.requests = make.counter(name + "requests", "HTTP requests received", "method", "path")
        self.duration = make.seconds(
            name + "request_duration_seconds",
            "Time from a request to the last byte of its response",
            "method",
            "path",
        )
        self.responses = make.counter(
            name + "responses", "HTTP responses sent", "status_code", "error_code"
        )
        self.connections = make.level(name + "connections_active", "HTTP requests being answered")
        self.rate_limit = make.counter(
            name + "rate_limit", "Requests admitted or refused by rate limits", "result"
        )


class RouterMetrics:
    """Metrics of forwarded requests."""

    def __init__(self, make: MetricMaker) -> None:
        name = PREFIX + "router_"
        self.requests = make.counter(
            name + "requests", "Requests forwarded to workers", *_ROUTER, "streaming"
        )
        self.duration = make.seconds(
            name + "request_duration_seconds",
            "Time from forwarding a request to the last byte",
            *_ROUTER,
        )
        self.errors = make.counter(
            name + "request_errors", "Forwarded requests that failed", *_ROUTER, "error_type"
        )
        self.stages = make.seconds(
            name + "stage_duration_seconds",
            "Time in each stage of forwarding",
            "router_type",
            "stage",
        )
        self.upstream = make.counter(
            name + "upstream_responses", "Responses of workers", "router_type", "status_code"
        )
        self.ttft = make.seconds(
            name + "ttft_seconds", "Time from forwarding a request to the first byte", *_ROUTER
        )
        self.tpot = make.seconds(
            name + "tpot_seconds", "Mean time per output token after the first", *_ROUTER
        )
        self.tokens = make.counter(
            name + "tokens", "Tokens of prompts and outputs", *_ROUTER, "token_type"
        )
        self.generation = make.seconds(
            name + "generation_duration_seconds", "Time from the first byte to the last", *_ROUTER
        )
        self.continued = make.total(
            OWN_PREFIX + "streams_continued", "Broken streams that another worker continued"
        )
        self.cut = make.total(OWN_PREFIX + "streams_cut", "Broken streams that no worker continued")


class WorkerMetrics:
    """Metrics of events at workers; their state is read at scrape time (`control.gauges`)."""

    def __init__(self, make: MetricMaker) -> None:
        name = PREFIX + "worker_"
        self.checks = make.counter(
            name + "health_checks", "Health checks of workers", "worker_type", "result"
        )
        self.selections = make.counter(
            name + "selection",
            "Workers chosen by policies",
            *("worker_type", "connection_mode", "model_id", "policy"),
        )
        self.errors = make.counter(
            name + "errors",
            "Failed requests to workers",
            "worker_type",
            "connection_mode",
            "error_type",
        )
        self.transitions = make.counter(
            name + "cb_transitions", "Changes of state of circuit breakers", "worker", "from", "to"
        )
        self.outcomes = make.counter(
            name + "cb_outcomes", "Outcomes reported to circuit breakers", "worker", "outcome"
        )
        self.retries = make.counter(
            name + "retries", "Retries of requests", "worker_type", "endpoint"
        )
        self.exhausted = make.counter(
            name + "retries_exhausted",
            "Requests that failed after all retries",
            "worker_type",
            "endpoint",
        )
        self.backoff = make.seconds(
            name + "retry_backoff_seconds", "Pauses before retries", "attempt"
        )


class PolicyMetrics:
    """Metrics of routing decisions."""

    def __init__(self, make: MetricMaker) -> None:
        names = ("manual", "prefix_hash", "consistent_hashing")
        self.branches = {
            name: make.counter(
                PREFIX + f"{name}_policy_branch", "Choices of the policy, by reason", "branch"
            )
            for name in names
        }
        self.branches["cache_aware"] = make.counter(
            OWN_PREFIX + "cache_aware_policy_branch", "Choices of the policy, by reason", "branch"
        )


class DiscoveryMetrics:
    """Metrics of service discovery."""

    def __init__(self, make: MetricMaker) -> None:
        name = PREFIX + "discovery_"
        self.registrations = make.counter(
            name + "registrations", "Workers added by discovery", "source", "result"
        )
        self.deregistrations = make.counter(
            name + "deregistrations", "Workers removed by discovery", "source", "reason"
        )
        self.sync = make.seconds(
            name + "sync_duration_seconds", "Time of one search for workers", "source"
        )
        self.workers = make.gauge(
            name + "workers_discovered", "Workers found by discovery", "source"
        )


class HistoryMetrics:
    """Metrics of stored responses and conversations."""

    def __init__(self, make: MetricMaker) -> None:
        name = PREFIX + "db_"
        self.operations = make.counter(
            name + "operations",
            "Operations of the store of responses",
            "storage_type",
            "operation",
            "result",
        )
        self.duration = make.seconds(
            name + "operation_duration_seconds",
            "Time of one operation of the store",
            "storage_type",
            "operation",
        )
        self.connections = make.gauge(
            name + "connections_active", "Open connections to the store", "storage_type"
        )
        self.items = make.gauge(
            name + "items_stored", "Responses and conversations in the store", "storage_type"
        )


class GatewayMetrics:
    """All metrics."""

    def __init__(self, buckets: Sequence[float] = ()) -> None:
        self.registry = CollectorRegistry()
        make = MetricMaker(self.registry, buckets)
        self.http = HttpMetrics(make)
        self.router = RouterMetrics(make)
        self.worker = WorkerMetrics(make)
        self.policy = PolicyMetrics(make)
        self.discovery = DiscoveryMetrics(make)
        self.history = HistoryMetrics(make)
