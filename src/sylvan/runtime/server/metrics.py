"""Prometheus metrics and tenants' budgets: each request is counted here once, at its end.

Counts what the engine generated, whether or not a client stayed to read it: a client that
disconnects from a stream is still charged for its tokens.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram

from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.protocol.messages import Usage
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.disagg_metrics import DisaggMetrics
from sylvan.runtime.server.keyring import Keyring, Tenant
from sylvan.runtime.server.observe.calls import CallMetrics, ConnectionCounts, ProcessorTime
from sylvan.runtime.server.observe.labels import MetricLabels
from sylvan.runtime.server.observe.load import RANK_LABELS, LoadMetrics
from sylvan.runtime.server.observe.requests import RequestMetrics
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.server.tier_metrics import TierMetrics
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.utils.loop_watch import LoopStall


class Accounts:
    """Records metrics, and charges tenants.

    Args:
        engine: The engine, whose load is exported.
        keyring: Budgets of tenants.
        settings: Names, labels and bounds of metrics.

    Raises:
        ConfigError: A label or a bucket bound is invalid.
    """

    def __init__(
        self, engine: TokenizerManager, keyring: Keyring, settings: ServerSettings
    ) -> None:
        observe = settings.observe
        prefix = observe.metrics_prefix
        self._keyring = keyring
        self._registry = registry = CollectorRegistry()
        base = {"model_name": settings.served_model_name, "engine_type": settings.role or "unified"}
        self.labels = MetricLabels(base, observe.metric_labels, observe.custom_labels)
        registry.register(LoadMetrics(engine, prefix, self.labels.base))
        tiers = {**self.labels.base, **RANK_LABELS}
        registry.register(TierMetrics(lambda: engine.load().tiers, prefix, tiers))
        registry.register(DisaggMetrics(lambda: engine.load().disagg, prefix, tiers))
        registry.register(ProcessorTime(engine, prefix))
        self._requests = RequestMetrics(observe, self.labels, registry)
        self._calls = CallMetrics(prefix, registry)
        self._loads = Histogram(
            f"{prefix}get_loads_duration_seconds", "Time to answer /v1/loads", registry=registry
        )
        self._startup = Gauge(
            f"{prefix}startup_time_seconds",
            "Time of each phase of the start",
            ["phase"],
            registry=registry,
        )
        engine.router.observers.append(self.ended)

    def ended(self, live: LiveRequest) -> None:
        """Count a finished request; the prompt that samples share counts once."""
        if live.internal:
            return
        kept = [sample for sample in live.samples if not _is_refused(sample)]
        first = max((s.usage for s in kept), key=lambda usage: usage.prompt_tokens, default=Usage())
        output = sum(sample.usage.completion_tokens for sample in kept)
        # if the client left before the first token, only the prompt is known, and it counts
        prompt = first.prompt_tokens or (len(live.samples[0].request.input_ids) if kept else 0)
        self._keyring.charge(Tenant(name=live.tenant), prompt + output)
        self._requests.add(live, first, output)

    def called(self, endpoint: str, method: str, status: int) -> None:
        """Count a call of a route."""
        self._calls.called(endpoint, method, status)

    def under_way(self, endpoint: str, method: str) -> AbstractContextManager[object]:
        """Count a call as in flight while the context is open."""
        return self._calls.active(endpoint, method)

    def timed_loads(self) -> AbstractContextManager[object]:
        """Time how long collecting the loads takes."""
        return self._loads.time()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start measuring event loop lag."""
        self._calls.watch(loop)

    def refused(self, error: SylvanError) -> None:
        """Count a rejection, if a limit caused it."""
        if isinstance(error, RequestError | CapacityError) and error.setting is not None:
            self._calls.refused(error.setting)

    def loop_stalled(self, stall: LoopStall) -> None:
        """Count and log a function that blocked the event loop; thread-safe."""
        self._calls.loop_stalled(stall)

    def show_connections(self, connections: Connections) -> None:
        """Export the number of open connections, and of closed ones by reason."""
        self._registry.register(ConnectionCounts(connections))

    def started(self, seconds: float) -> None:
        """Record how long the start took."""
        self._startup.labels("total").set(seconds)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)


def _is_refused(sample: SampleState) -> bool:
    """Whether the engine rejected a request; one that failed later counts as served."""
    refused = sample.finish is not None and sample.finish.status is not None
    return refused and not sample.usage.completion_tokens
