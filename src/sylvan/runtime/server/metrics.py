"""Numbers for Prometheus, and the charging of tenants: every request passes here once, at its end.

What is counted is what the engine reported, whether or not a client stayed to read it: whoever
leaves amid a stream has had its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sylvan.protocol.messages import Finish, Timing, Usage
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.disagg_metrics import DisaggMetrics
from sylvan.runtime.server.keyring import Keyring, Tenant
from sylvan.runtime.server.tier_metrics import TierMetrics
from sylvan.runtime.server.token_latency import BUCKETS, TokenLatency
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.manager import TokenizerManager

PREFIX = "sglang:"
LAG_PERIOD_S = 0.25
_LEFT = Finish(type="abort", message="the client left")
_LATENCIES = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Accounts:
    """Counts what is served, and charges it to tenants.

    Args:
        engine: Its load is shown.
        keyring: Budgets of tenants.
        model: Name of the model, a label of most metrics.
    """

    def __init__(self, engine: TokenizerManager, keyring: Keyring, model: str) -> None:
        self._keyring = keyring
        self._registry = registry = CollectorRegistry()
        registry.register(_LoadGauges(engine, model))
        labels = {"model_name": model, "engine_type": "unified"}
        registry.register(TierMetrics(lambda: engine.load().tiers, PREFIX, labels))
        registry.register(DisaggMetrics(lambda: engine.load().disagg, PREFIX, labels))

        def counter(name: str, doc: str, *more: str) -> Counter:
            return Counter(PREFIX + name, doc, [*labels, *more], registry=registry)

        def histogram(name: str, doc: str, buckets: tuple[float, ...] = _LATENCIES) -> Histogram:
            made = Histogram(PREFIX + name, doc, list(labels), buckets=buckets, registry=registry)
            return made.labels(**labels)

        self._prompt = counter("prompt_tokens", "Tokens of prompts").labels(**labels)
        self._output = counter("generation_tokens", "Tokens generated").labels(**labels)
        cached = counter("cached_tokens", "Prompt tokens from the cache", "cache_source")
        self._cached = cached.labels(**labels, cache_source="device")
        self._from_host = cached.labels(**labels, cache_source="host")
        self._loaded = cached.labels(**labels, cache_source="storage")
        self._finished = counter("num_requests", "Samples that ended", "finish")
        self._labels = labels
        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token")
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end")
        self._queue = histogram("queue_time_seconds", "Arrival to first computation")
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of each token of a request after the first",
            BUCKETS,
        )
        self._between = TokenLatency(PREFIX + "inter_token_latency_seconds", labels)
        registry.register(self._between)
        self._calls = Counter(
            PREFIX + "http_requests", "Calls", ["endpoint", "method"], registry=registry
        )
        self._answers = Counter(
            PREFIX + "http_responses",
            "Answers",
            ["endpoint", "status_code", "method"],
            registry=registry,
        )
        self._of_calls: dict[tuple[str, str, int], tuple[Counter, Counter]] = {}
        self._lag = Histogram(
            "sylvan:event_loop_lag_seconds",
            "How late the event loop runs what is due",
            buckets=_LAGS,
            registry=registry,
        )
        self._due_s = 0.0
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
        self._prompt.inc(first.prompt_tokens)
        self._output.inc(output)
        self._cached.inc(first.cached_tokens - first.loaded_tokens - first.host_tokens)
        self._from_host.inc(first.host_tokens)
        self._loaded.inc(first.loaded_tokens)
        for sample in live.samples:
            tokens = sample.usage.completion_tokens
            self._count_end(sample.finish or _LEFT, sample.timing, tokens)

    def _count_end(self, finish: Finish, timing: Timing | None, tokens: int) -> None:
        kind = finish.type
        if kind == "abort":
            kind = "abort_client" if finish.status is None else "abort_server"
        self._finished.labels(**self._labels, finish=kind).inc()
        if timing is None or not timing.received:
            return
        for metric, at in (
            (self._queue, timing.started),
            (self._first_token, timing.first_token),
            (self._e2e, timing.finished),
        ):
            if at:
                metric.observe(max(0.0, at - timing.received))
        if tokens > 1 and timing.first_token and timing.finished:
            seconds = max(0.0, timing.finished - timing.first_token) / (tokens - 1)
            self._per_token.observe(seconds)
            self._between.observe(seconds, tokens - 1)

    def called(self, endpoint: str, method: str, status: int) -> None:
        """Count a call of a route."""
        counters = self._of_calls.get((endpoint, method, status))
        if counters is None:
            answers = self._answers.labels(endpoint, str(status), method)
            counters = self._calls.labels(endpoint, method), answers
            self._of_calls[endpoint, method, status] = counters
        for counter in counters:
            counter.inc()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure from now on how late the event loop is."""
        now = loop.time()
        if self._due_s:
            self._lag.observe(max(0.0, now - self._due_s))
        self._due_s = now + LAG_PERIOD_S
        loop.call_at(self._due_s, self.watch, loop)

    def show_connections(self, connections: Connections) -> None:
        """Show how many connections are open, and how many were ended and why."""
        self._registry.register(_ConnectionCounts(connections))

    def exposition(self) -> bytes:
        """All of it as text."""
        return prometheus_client.generate_latest(self._registry)


def _is_refused(sample: SampleState) -> bool:
    """Whether the engine turned it away; what ran into an error later has been served."""
    refused = sample.finish is not None and sample.finish.status is not None
    return refused and not sample.usage.completion_tokens


class _ConnectionCounts(Collector):
    """Connections, and those that were refused or ended."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        yield GaugeMetricFamily(
            "sylvan:connections", "Connections that are open", value=len(self._connections)
        )
        ended = CounterMetricFamily(
            "sylvan:connections_ended", "Connections that a limit ended", labels=["reason"]
        )
        for reason, count in self._connections.refused.items():
            ended.add_metric([reason], count)
        yield ended


class _LoadGauges(Collector):
    """The load of all schedulers at their last heartbeats, together."""

    def __init__(self, engine: TokenizerManager, model: str) -> None:
        self._engine = engine
        self._values = [model, "unified"]

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        load, facts = self._engine.load(), self._engine.facts
        capacity = load.max_total_num_tokens or facts.max_total_tokens
        seen = load.cached_prompt_tokens + load.computed_tokens
        values = {
            "num_running_reqs": load.num_running_reqs,
            "num_queue_reqs": load.num_waiting_reqs,
            "num_used_tokens": load.num_used_tokens,
            "kv_evictable_tokens": load.num_cached_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": load.num_used_tokens / capacity if capacity else 0.0,
            "cache_hit_rate": load.cached_prompt_tokens / seen if seen else 0.0,
            "gen_throughput": load.gen_throughput,
            "context_len": facts.context_len,
            "num_retracted_reqs": load.retractions,
            "generated_tokens": load.generated_tokens,
            "spec_accept_length": load.accept_length,
            "spec_accept_rate": load.accept_rate,
            "spec_verified_drafts": load.verified_drafts,
            "spec_proposed_tokens": load.proposed_draft_tokens,
            "spec_accepted_tokens": load.accepted_draft_tokens,
            "lora_pool_slots_used": load.lora_slots_used,
            "lora_pool_slots_total": load.lora_slots_total,
            "lora_pool_utilization": load.lora_utilization,
            "lora_adapters": load.lora_adapters,
            "lora_host_copies": load.lora_copies,
            "num_grammar_queue_reqs": load.num_grammar_reqs,
            "grammar_tries": load.grammar_tries,
            "grammar_taken_back_tokens": load.grammar_taken_back,
            "targets_set": load.targets_set,
            "targets_met": load.targets_met,
            "repaired_pages": load.repaired_pages,
            "repaired_locks": load.repaired_locks,
            "repaired_states": load.repaired_states,
        }
        for name, value in values.items():
            gauge = GaugeMetricFamily(
                PREFIX + name,
                f"{name} at the last heartbeat",
                labels=["model_name", "engine_type"],
            )
            gauge.add_metric(self._values, value)
            yield gauge
