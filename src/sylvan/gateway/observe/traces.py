"""Traces over OTLP; needs the extra `trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sylvan.api.version import VERSION
from sylvan.gateway.observe.spans import TRACE_HEADERS
from sylvan.utils import otlp


class SpanExporter:
    """Exports a span per request to a collector, in batches, from a thread.

    If the collector is unreachable, spans are lost; requests are not affected.

    Args:
        endpoint: Address of the collector; see `otlp.span_processor`.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "sylvan-gateway", "service.version": VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = otlp.span_processor(endpoint)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("sylvan.gateway", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        carrier = {key: value for key in TRACE_HEADERS if (value := headers.get(key))}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(name, context=parent, kind=trace.SpanKind.SERVER)
        return RequestSpan(span, self._propagator)

    async def close(self) -> None:
        """Flush the remaining spans."""
        await otlp.close(self._processor)


class RequestSpan:
    """The span of one request; see `TraceSpan`."""

    def __init__(self, span: trace.Span, propagator: TraceContextTextMapPropagator) -> None:
        self._span = span
        self._propagator = propagator

    def headers(self) -> Sequence[tuple[str, str]] | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=trace.set_span_in_context(self._span))
        return list(carrier.items())

    def event(self, name: str, facts: Mapping[str, str | int | float]) -> None:
        self._span.add_event(name, dict(facts))

    def end(self, status: int, facts: Mapping[str, str | int | float]) -> None:
        self._span.set_attributes({"http.response.status_code": status, **facts})
        if status >= 500:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()
