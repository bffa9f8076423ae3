"""Traces of requests as trees of spans: kept for a while, and exported.

A request gets its trace when it is admitted: the caller's (W3C `traceparent`), or a new one.
Its spans are built from times that all processes recorded, when they are exported or asked for;
tracing does no work while tokens are generated.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec

from sylvan.runtime.tokenizer.ended import EndedRequest, EndedSample, ended
from sylvan.runtime.tokenizer.live import LiveRequest
from sylvan.runtime.tokenizer.timeline import Process, RequestStage
from sylvan.utils.clock import Clock
from sylvan.utils.names import random_hex

KEPT = 1024
"""Finished requests whose spans are kept."""
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_ID = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that its multiples below 2^64 differ


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The trace context of a request.

    Attributes:
        trace_id: 32 hex digits.
        parent_id: 16 hex digits of the caller's span; empty: none.
        sampled: The caller wants the trace recorded.
        state: The caller's `tracestate`.
    """

    trace_id: str
    parent_id: str = ""
    sampled: bool = True
    state: str = ""


def read_context(headers: Mapping[str, str]) -> TraceContext:
    """Return the caller's trace context; a new one if it is missing or malformed."""
    given = headers.get("traceparent")
    found = _PARENT.fullmatch(given.strip()) if given else None
    if found is not None:
        version, trace_id, parent_id, flags, rest = found.groups()
        known = version != "ff" and not (version == "00" and rest)
        if known and int(trace_id, 16) and int(parent_id, 16):
            sampled = bool(int(flags, 16) & _SAMPLED)
            return TraceContext(trace_id, parent_id, sampled, headers.get("tracestate", ""))
    return TraceContext(random_hex(16))


class SpanEvent(msgspec.Struct, frozen=True):
    """A timestamped event in a span."""

    name: str
    at_s: float
    facts: Mapping[str, str | int | float]


class SpanRecord(msgspec.Struct, frozen=True):
    """A finished span. Times: seconds of the monotonic clock.

    Attributes:
        process: Process that spent the time.
        parent_id: ID of the parent span; empty: none.
    """

    name: str
    process: Process
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    facts: Mapping[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, Any])
    events: tuple[SpanEvent, ...] = ()
    error: str = ""


class RequestTrace(msgspec.Struct, frozen=True):
    """The spans of a request, its root first."""

    rid: str
    tenant: str
    context: TraceContext
    spans: tuple[SpanRecord, ...]


Export = Callable[[RequestTrace], None]


class _Trace(msgspec.Struct, frozen=True, gc=False):
    """A finished request whose spans can be built."""

    request: EndedRequest
    context: TraceContext
    span_id: str

    def spans(self, model: str) -> RequestTrace:
        request = self.request
        spans = _spans(request, self.context, self.span_id, model)
        return RequestTrace(request.rid, request.tenant, self.context, spans)


class Traces:
    """The traces of the newest finished requests.

    Args:
        size: Number of traces kept.
        export: Receives each trace that its caller did not unsample.
        model: Name of the model.

    Attributes:
        level: What is exported: 0 nothing, 1 one span per request, 2 its stages too, 3 also their
            events.
    """

    def __init__(self, size: int, export: Export | None, model: str) -> None:
        self.level = 2
        self._size, self._export, self._model = size, export, model
        self._contexts: dict[LiveRequest, tuple[TraceContext, str]] = {}
        self._done: OrderedDict[tuple[str, str], _Trace] = OrderedDict()

    @property
    def exports(self) -> bool:
        """Whether a collector is configured."""
        return self._export is not None

    def admitted(self, live: LiveRequest) -> None:
        """Start the trace of an admitted request."""
        if not live.internal:
            self._contexts[live] = read_context(live.origin.trace), random_hex(8)

    def context(self, live: LiveRequest) -> TraceContext | None:
        """Return the trace context of a running or just finished request."""
        found = self._contexts.get(live)
        return found[0] if found is not None else None

    def ended(self, live: LiveRequest) -> None:
        """Keep a finished request, and export its spans."""
        found = self._contexts.pop(live, None)
        if found is None:
            return
        context, span_id = found
        trace = _Trace(ended(live), context, span_id)
        self._keep(trace)
        if self._export is not None and self.level and context.sampled:
            self._export(_cut(trace.spans(self._model), self.level))

    def find(self, rid: str, tenant: str | None) -> RequestTrace | None:
        """Return the newest trace with that request ID; with `tenant`, of that tenant only."""
        if tenant is not None:
            found = self._done.get((tenant, rid))
        else:
            named = (t for (_, name), t in reversed(self._done.items()) if name == rid)
            found = next(named, None)
        return found.spans(self._model) if found is not None else None

    def newest(self, count: int, tenant: str | None) -> list[RequestTrace]:
        """Return the newest traces, latest first."""
        own = (t for t in reversed(self._done.values()) if tenant in (None, t.request.tenant))
        return [trace.spans(self._model) for trace in islice(own, count)]

    def _keep(self, trace: _Trace) -> None:
        key = trace.request.tenant, trace.request.rid
        self._done.pop(key, None)
        self._done[key] = trace
        while len(self._done) > self._size:
            self._done.popitem(last=False)


def trace_json(trace: RequestTrace, wall: float, clock: Clock) -> dict[str, Any]:
    """Return a trace as JSON: a tree of spans, with stages that add up to its duration.

    Args:
        trace: The trace.
        wall: Current seconds since the Unix epoch.
        clock: Clock of the spans' times.
    """
    offset = wall - clock()
    own, *others = trace.spans
    return {
        "rid": trace.rid,
        "trace_id": trace.context.trace_id,
        "parent_span_id": trace.context.parent_id or None,
        "start": own.start_s + offset,
        "duration_ms": _ms(own.end_s - own.start_s),
        "spans": [_span_json(span, own.start_s) for span in (own, *others)],
    }


def _span_json(span: SpanRecord, began: float) -> dict[str, Any]:
    return {
        "name": span.name,
        "process": span.process,
        "span_id": span.span_id,
        "parent_id": span.parent_id or None,
        "start_ms": _ms(span.start_s - began),
        "duration_ms": _ms(span.end_s - span.start_s),
        "attributes": dict(span.facts),
        "events": [
            {"name": e.name, "at_ms": _ms(e.at_s - began), "attributes": dict(e.facts)}
            for e in span.events
        ],
        **({"error": span.error} if span.error else {}),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _cut(trace: RequestTrace, level: int) -> RequestTrace:
    """Return the part of a trace that a level exports."""
    spans = trace.spans if level > 1 else trace.spans[:1]
    if level < 3:
        spans = tuple(
            SpanRecord(
                *(s.name, s.process, s.span_id, s.parent_id, s.start_s, s.end_s, s.facts),
                error=s.error,
            )
            for s in spans
        )
    return RequestTrace(trace.rid, trace.tenant, trace.context, spans)


def _spans(
    request: EndedRequest, context: TraceContext, span_id: str, model: str
) -> tuple[SpanRecord, ...]:
    several = len(request.samples) > 1
    found = [_own_span(request, context, span_id, model)]
    for sample in request.samples:
        facts: dict[str, str | int | float | bool] = {"sample": sample.index} if several else {}
        for each in sample.stages:
            found.append(_stage_span(each, _span_id(span_id, len(found)), span_id, facts, sample))
    return tuple(found)


def _span_id(parent_id: str, number: int) -> str:
    """Derive a unique ID for a part of a span."""
    return f"{int(parent_id, 16) ^ number * _SPREAD & _MAX_ID:016x}"


def _stage_span(
    stage: RequestStage, span_id: str, parent_id: str, facts: Mapping[str, Any], sample: EndedSample
) -> SpanRecord:
    usage = sample.usage
    if stage.name == "prefill_forward":
        facts = {
            **facts,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
        }
    elif stage.name == "decode_forward":
        facts = {**facts, "completion_tokens": usage.completion_tokens}
    return SpanRecord(
        stage.name,
        stage.process,
        span_id,
        parent_id,
        stage.start_s,
        stage.end_s,
        facts,
    )


def _own_span(request: EndedRequest, context: TraceContext, span_id: str, model: str) -> SpanRecord:
    samples = request.samples
    end_s = max((s.delivered_s for s in samples), default=0.0) or request.closed_s
    finishes = [s.finish.type if s.finish else "abort" for s in samples]
    facts: dict[str, str | int | float | bool] = {
        "rid": request.rid,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": max(s.usage.prompt_tokens for s in samples),
        "gen_ai.usage.output_tokens": sum(s.usage.completion_tokens for s in samples),
        "gen_ai.response.finish_reasons": ",".join(finishes),
        "cached_tokens": samples[0].usage.cached_tokens,
        "stream": request.streams,
        "dp_rank": request.replica,
    }
    if request.max_new_tokens is not None:
        facts["gen_ai.request.max_tokens"] = request.max_new_tokens
    if request.tenant:
        facts["tenant"] = request.tenant
    failed = next((s.finish for s in samples if s.finish and s.finish.status), None)
    return SpanRecord(
        request.call or "generate",
        "api",
        span_id,
        context.parent_id,
        request.began_s,
        max(request.began_s, end_s),
        facts,
        _events(request),
        failed.message if failed is not None else "",
    )


def _events(request: EndedRequest) -> tuple[SpanEvent, ...]:
    """Return further events, at the times they were recorded."""
    found: list[SpanEvent] = []
    for sample in request.samples:
        at = sample.last_s or request.closed_s
        counts = {
            "retracted": sample.usage.retractions,
            "replayed": sample.losses,
            "taken_back": sample.usage.taken_back,
        }
        for name, count in counts.items():
            if count:
                found.append(SpanEvent(name, at, {"sample": sample.index, "count": count}))
        if sample.first_s:
            found.append(SpanEvent("first_text", sample.first_s, {"sample": sample.index}))
        if len(sample.weight_versions) > 1:
            versions = ",".join(sample.weight_versions)
            found.append(SpanEvent("weights_replaced", at, {"versions": versions}))
    return tuple(found)
