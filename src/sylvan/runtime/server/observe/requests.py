"""Metrics of requests: each request is counted here once, at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import get_args

from prometheus_client import CollectorRegistry

from sylvan.config.tree import ObserveConfig
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import GRAMMARS
from sylvan.runtime.server.observe import buckets
from sylvan.runtime.server.observe.labels import BoundedValues, MetricLabels
from sylvan.runtime.server.observe.series import (
    CounterFamily,
    CounterSeries,
    HistogramFamily,
    HistogramSeries,
)
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.timeline import StageName, began_s, stages

MAX_SERIES = 512
"""Limit of distinct label sets; further ones are counted without custom labels."""
MAX_TENANTS = 1000
_LEFT = Finish(type="abort", message="the client left")
_grammars_of = attrgetter(*GRAMMARS)


@dataclass(frozen=True, slots=True)
class _Series:
    """The metrics of requests with the same labels."""

    prompt: CounterSeries
    output: CounterSeries
    cached: tuple[CounterSeries, CounterSeries, CounterSeries]  # device, host, storage
    first_token: HistogramSeries
    e2e: HistogramSeries
    queue: HistogramSeries
    per_token: HistogramSeries
    between_tokens: HistogramSeries
    stages: dict[StageName, HistogramSeries]
    prompt_length: HistogramSeries
    uncached_length: HistogramSeries
    output_length: HistogramSeries
    structured: CounterSeries
    aborted: CounterSeries
    verified: CounterSeries
    values: tuple[str, ...]
    streaming: str
    finished: dict[str, CounterSeries] = field(default_factory=dict[str, CounterSeries])


class RequestMetrics:
    """Records tokens, durations and finish reasons of requests.

    Args:
        settings: Names and buckets.
        labels: Labels of these metrics.
        registry: Prometheus registry.
    """

    def __init__(
        self, settings: ObserveConfig, labels: MetricLabels, registry: CollectorRegistry
    ) -> None:
        self._labels, self._registry = labels, registry
        self._prefix = settings.metrics_prefix
        ttft = buckets.seconds(settings.ttft_buckets, buckets.TTFT_S, "observe.ttft_buckets")
        e2e = buckets.seconds(settings.e2e_buckets, buckets.E2E_S, "observe.e2e_buckets")
        token = buckets.seconds(settings.token_buckets, buckets.TOKEN_S, "observe.token_buckets")
        prompts = buckets.tokens(settings.prompt_token_buckets, "observe.prompt_token_buckets")
        outputs = buckets.tokens(settings.output_token_buckets, "observe.output_token_buckets")
        streaming = "is_streaming"
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts", streaming)
        self._output = self._counter("generation_tokens", "Tokens generated", streaming)
        self._cached = self._counter(
            "cached_tokens", "Prompt tokens whose KV came from a cache", "cache_source"
        )
        self._finished = self._counter("num_requests", "Samples that ended", streaming, "finish")
        self._aborted = self._counter("num_aborted_requests", "Samples that were aborted")
        self._structured = self._counter("num_so_requests", "Requests for structured output")
        self._verified = self._counter("spec_verify_calls", "Steps that verified drafts")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from a call to its first token", ttft, streaming
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Time from a call to the end of its answer",
            e2e,
            streaming,
        )
        self._queue = self._histogram(
            "queue_time_seconds",
            "Time from arrival at the scheduler to the first computation",
            ttft,
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, per request",
            token,
            streaming,
        )
        self._stages = self._histogram(
            "per_stage_req_latency_seconds",
            "Time in each stage of a request; the stages add up to the whole time",
            buckets.STAGE_S,
            "stage",
        )
        self._prompts = self._histogram("prompt_tokens_histogram", "Tokens of each prompt", prompts)
        self._uncached = self._histogram(
            "uncached_prompt_tokens_histogram",
            "Prompt tokens of each request that were computed",
            prompts,
        )
        self._outputs = self._histogram(
            "generation_tokens_histogram", "Tokens of each output", outputs
        )
        self._tenants = self._counter(
            "tenant_tokens",
            "Tokens by tenant and kind: prompts computed or cached, by tier, and outputs",
            "tenant",
            "kind",
        )
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "Mean time between two tokens of a request",
            token,
        )
        self._tenant_names = BoundedValues(MAX_TENANTS)
        self._series: dict[tuple[tuple[str, ...], bool], _Series] = {}

    def add(self, live: LiveRequest, shared: Usage, output: int) -> None:
        """Count a finished request.

        Args:
            live: The request; closed.
            shared: Counts of the prompt that its samples share.
            output: Tokens of all samples.
        """
        series = self._of(live)
        series.prompt.inc(shared.prompt_tokens)
        series.output.inc(output)
        tiers = _tiers(shared)
        if shared.cached_tokens:
            for counter, tokens in zip(series.cached, tiers[1:], strict=True):
                counter.inc(tokens)
        self._count_tenant(live.tenant, series, (*tiers, output))
        if shared.prompt_tokens:
            series.prompt_length.observe(shared.prompt_tokens)
            series.uncached_length.observe(tiers[0])
        request = live.request
        if isinstance(request, GenerateRequest) and any(_grammars_of(request.sampling)):
            series.structured.inc()
        for sample in live.samples:
            self._add_sample(series, live, sample)

    def _add_sample(self, series: _Series, live: LiveRequest, sample: SampleState) -> None:
        kind = _kind(sample.finish or _LEFT)
        finished = series.finished.get(kind)
        if finished is None:
            finished = self._finished.labels(*series.values, series.streaming, kind)
            series.finished[kind] = finished
        finished.inc()
        if kind.startswith("abort"):
            series.aborted.inc()
        tokens, timing = sample.usage.completion_tokens, sample.timing
        series.output_length.observe(tokens)
        if sample.usage.drafts is not None:
            series.verified.inc(sum(sample.usage.drafts.histogram))
        if timing is None or not timing.received:
            return
        for stage in stages(live, sample):
            series.stages[stage.name].observe(stage.seconds)
        if timing.started:
            series.queue.observe(max(0.0, timing.started - timing.received))
        began, ended = began_s(live), sample.delivered_s or live.closed_s
        series.e2e.observe(max(0.0, ended - began))
        if timing.first_token:
            first = sample.first_s if live.interval is not None else timing.first_token
            series.first_token.observe(max(0.0, first - began))
        if tokens > 1 and timing.first_token and timing.finished:
            seconds = max(0.0, timing.finished - timing.first_token) / (tokens - 1)
            series.per_token.observe(seconds)
            series.between_tokens.observe(seconds, tokens - 1)

    def _count_tenant(self, tenant: str, series: _Series, counts: tuple[int, ...]) -> None:
        if not tenant:
            return
        name = self._tenant_names.value(tenant)
        kinds = ("prompt_computed", "prompt_device", "prompt_host", "prompt_storage", "output")
        for kind, count in zip(kinds, counts, strict=True):
            if count:
                self._tenants.labels(*series.values, name, kind).inc(count)

    def _of(self, live: LiveRequest) -> _Series:
        values, streams = self._labels.values(live.origin.labels), live.interval is not None
        if (found := self._series.get((values, streams))) is not None:
            return found
        if len(self._series) >= MAX_SERIES:
            values = self._labels.values({})
            if (found := self._series.get((values, streams))) is not None:
                return found
        made = self._series[values, streams] = self._make(values, str(streams).lower())
        return made

    def _make(self, values: tuple[str, ...], streaming: str) -> _Series:
        sources = ("device", "host", "storage")
        device, host, storage = (self._cached.labels(*values, source) for source in sources)
        names: tuple[StageName, ...] = get_args(StageName)
        return _Series(
            prompt=self._prompt.labels(*values, streaming),
            output=self._output.labels(*values, streaming),
            cached=(device, host, storage),
            first_token=self._ttft.labels(*values, streaming),
            e2e=self._e2e.labels(*values, streaming),
            queue=self._queue.labels(*values),
            per_token=self._per_token.labels(*values, streaming),
            between_tokens=self._between.labels(*values),
            stages={name: self._stages.labels(*values, name) for name in names},
            prompt_length=self._prompts.labels(*values),
            uncached_length=self._uncached.labels(*values),
            output_length=self._outputs.labels(*values),
            structured=self._structured.labels(*values),
            aborted=self._aborted.labels(*values),
            verified=self._verified.labels(*values),
            values=values,
            streaming=streaming,
        )

    def _counter(self, name: str, doc: str, *more: str) -> CounterFamily:
        names = [*self._labels.names, *more]
        return CounterFamily(self._prefix + name, doc, names, self._registry)

    def _histogram(
        self, name: str, doc: str, bounds: tuple[float, ...], *more: str
    ) -> HistogramFamily:
        names = [*self._labels.names, *more]
        return HistogramFamily(self._prefix + name, doc, bounds, names, self._registry)


def _tiers(usage: Usage) -> tuple[int, int, int, int]:
    """Return the computed prompt tokens, and those from device, host and storage."""
    lower = usage.loaded_tokens + usage.host_tokens
    computed = max(0, usage.prompt_tokens - usage.cached_tokens)
    return computed, usage.cached_tokens - lower, usage.host_tokens, usage.loaded_tokens


def _kind(finish: Finish) -> str:
    """Return why a sample ended; client aborts are distinguished from the server's."""
    if finish.type != "abort":
        return finish.type
    return "abort_client" if finish.status is None else "abort_server"
