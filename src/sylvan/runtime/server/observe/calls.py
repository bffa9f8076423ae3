"""Metrics of calls, connections, the event loop and the processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.observe.buckets import LAG_S
from sylvan.runtime.server.observe.series import CounterFamily, CounterSeries, GaugeFamily
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.utils.clock import process_cpu
from sylvan.utils.loop_watch import LoopStall

log = logging.getLogger(__name__)

LAG_PERIOD_S = 0.25


class CallsUnderWay:
    """Counts the calls of one route that are in flight: each is one use as a context manager."""

    __slots__ = ("_count",)

    def __init__(self, count: CounterSeries) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._count.value += 1

    def __exit__(self, *error: object) -> None:
        self._count.value -= 1


class CallMetrics:
    """Counts calls of routes, and measures event loop lag.

    Args:
        prefix: Prefix of metric names that SGLang has too.
        registry: Prometheus registry.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        names = ["endpoint", "method"]
        self._calls = CounterFamily(
            f"{prefix}http_requests", "HTTP requests received", names, registry
        )
        self._answers = CounterFamily(
            f"{prefix}http_responses",
            "HTTP responses sent",
            ["endpoint", "status_code", "method"],
            registry,
        )
        self._active = GaugeFamily(
            f"{prefix}http_requests_active", "HTTP requests being answered", names, registry
        )
        self._lag = Histogram(
            "sylvan:event_loop_lag_seconds",
            "Delay of the event loop in running due callbacks",
            buckets=LAG_S,
            registry=registry,
        )
        self._stalls = Counter(
            "sylvan:event_loop_holds",
            "Times that a function blocked the event loop too long (observe.loop_hold_s)",
            ["function"],
            registry=registry,
        )
        self._stalled = Counter(
            "sylvan:event_loop_held_seconds",
            "Time for which a function blocked the event loop too long",
            ["function"],
            registry=registry,
        )
        self._refusals = Counter(
            "sylvan:refusals",
            "Requests refused because they ask for more than a setting allows",
            ["setting"],
            registry=registry,
        )
        self._of_calls: dict[tuple[str, str, int], tuple[CounterSeries, CounterSeries]] = {}
        self._of_active: dict[tuple[str, str], CallsUnderWay] = {}
        self._due_s = 0.0

    def called(self, endpoint: str, method: str, status: int) -> None:
        """Count a call of a route."""
        counters = self._of_calls.get((endpoint, method, status))
        if counters is None:
            answers = self._answers.labels(endpoint, str(status), method)
            counters = self._calls.labels(endpoint, method), answers
            self._of_calls[endpoint, method, status] = counters
        for counter in counters:
            counter.value += 1

    def active(self, endpoint: str, method: str) -> CallsUnderWay:
        """Return the count of a route's calls in flight."""
        found = self._of_active.get((endpoint, method))
        if found is None:
            found = CallsUnderWay(self._active.labels(endpoint, method))
            self._of_active[endpoint, method] = found
        return found

    def refused(self, setting: str) -> None:
        """Count a call rejected because of the limit that a setting sets."""
        self._refusals.labels(setting).inc()

    def loop_stalled(self, stall: LoopStall) -> None:
        """Count and log a function that blocked the event loop; thread-safe."""
        self._stalls.labels(stall.function).inc()
        self._stalled.labels(stall.function).inc(stall.seconds)
        log.warning("%s", stall)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start measuring event loop lag."""
        now = loop.time()
        if self._due_s:
            self._lag.observe(max(0.0, now - self._due_s))
        self._due_s = now + LAG_PERIOD_S
        loop.call_at(self._due_s, self.watch, loop)


class ConnectionCounts(Collector):
    """Open connections, and closed or rejected ones by reason."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "sylvan:connections", "Open connections", value=len(self._connections)
        )
        ended = CounterMetricFamily(
            "sylvan:connections_ended", "Connections closed because of a limit", labels=["reason"]
        )
        for reason, count in self._connections.refused.items():
            ended.add_metric([reason], count)
        yield ended


class ProcessorTime(Collector):
    """CPU time of the API process and the schedulers."""

    def __init__(self, engine: TokenizerManager, prefix: str) -> None:
        self._engine, self._prefix = engine, prefix

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}process_cpu_seconds",
            "Processor time of all threads of a process",
            labels=["component"],
        )
        family.add_metric(["tokenizer"], process_cpu())
        family.add_metric(["scheduler"], self._engine.load().cpu_seconds)
        yield family
