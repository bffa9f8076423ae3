"""Numbers for Prometheus, and the charging of tenants: every request passes here once, at its end.

What is counted is what the engine reported, whether or not a client stayed to read it: whoever
leaves amid a stream has had its tokens.
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
from sylvan.utils.loop_watch import Hold


class Accounts:
    """Counts what is served, and charges it to tenants.

    Args:
        engine: Its load is shown.
        keyring: Budgets of tenants.
        settings: Names, labels and bounds of metrics.

    Raises:
        ConfigError: A label or a bound of the operator's is none.
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
            f"{prefix}get_loads_duration_seconds", "Time of /v1/loads", registry=registry
        )
        self._startup = Gauge(
            f"{prefix}startup_time_seconds", "Time of the start", ["phase"], registry=registry
        )
        engine.router.observers.append(self.ended)

    def ended(self, live: LiveRequest) -> None:
        """Count a request that is over; the prompt that its samples share counts once."""
        if live.internal:
            return
        kept = [sample for sample in live.samples if not _is_refused(sample)]
        first = max((s.usage for s in kept), key=lambda usage: usage.prompt_tokens, default=Usage())
        output = sum(sample.usage.completion_tokens for sample in kept)
        # of one who leaves before the first token nothing is known but the prompt, which counts
        prompt = first.prompt_tokens or (len(live.samples[0].request.input_ids) if kept else 0)
        self._keyring.charge(Tenant(name=live.tenant), prompt + output)
        self._requests.add(live, first, output)

    def called(self, endpoint: str, method: str, status: int) -> None:
        """Count a call of a route."""
        self._calls.called(endpoint, method, status)

    def under_way(self, endpoint: str, method: str) -> AbstractContextManager[object]:
        """Counts a call as under way while it is entered."""
        return self._calls.active(endpoint, method).track_inprogress()

    def timed_loads(self) -> AbstractContextManager[object]:
        """Measures how long it takes to tell the loads."""
        return self._loads.time()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure from now on how late the event loop is."""
        self._calls.watch(loop)

    def refused(self, error: SylvanError) -> None:
        """Count a refusal, if a setting bounds what was asked for."""
        if isinstance(error, RequestError | CapacityError) and error.setting is not None:
            self._calls.refused(error.setting)

    def held(self, hold: Hold) -> None:
        """Count and log that a function held up the event loop; may be called in any thread."""
        self._calls.held(hold)

    def show_connections(self, connections: Connections) -> None:
        """Show how many connections are open, and how many were ended and why."""
        self._registry.register(ConnectionCounts(connections))

    def started(self, seconds: float) -> None:
        """Tell how long the start took."""
        self._startup.labels("total").set(seconds)

    def exposition(self) -> bytes:
        """All of it as text."""
        return prometheus_client.generate_latest(self._registry)


def _is_refused(sample: SampleState) -> bool:
    """Whether the engine turned it away; what ran into an error later has been served."""
    refused = sample.finish is not None and sample.finish.status is not None
    return refused and not sample.usage.completion_tokens
