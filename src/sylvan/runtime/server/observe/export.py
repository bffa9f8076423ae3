"""Exports request spans over OpenTelemetry; needs the extra `trace`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from sylvan.api.version import VERSION
from sylvan.runtime.server.observe.traces import RequestTrace, SpanRecord, TraceContext
from sylvan.runtime.tokenizer.timeline import Process
from sylvan.utils import otlp
from sylvan.utils.clock import Clock

_SCOPE = InstrumentationScope("sylvan.runtime", VERSION)


class SpanExport:
    """Exports traces to a collector, in batches, from a thread.

    Args:
        endpoint: See `otlp.span_processor`.
        service: Service name in traces.
        clock: Clock of the spans' times.
        now: Returns the seconds since the Unix epoch.

    Raises:
        ImportError: A package is not installed.
    """

    def __init__(self, endpoint: str, service: str, clock: Clock, now: float) -> None:
        self._processor = otlp.span_processor(endpoint)
        self._offset_s = now - clock()
        self._resources: Mapping[Process, Resource] = {
            process: Resource.create(
                {
                    "service.name": service,
                    "service.version": VERSION,
                    "sylvan.process": process,
                }
            )
            for process in get_args(Process)
        }

    def __call__(self, trace: RequestTrace) -> None:
        """Queue the spans of a request."""
        for span in trace.spans:
            self._processor.on_end(self._span(span, trace.context, is_own=span is trace.spans[0]))

    async def close(self) -> None:
        """Flush the remaining spans."""
        await otlp.close(self._processor)

    def _span(self, span: SpanRecord, context: TraceContext, *, is_own: bool) -> ReadableSpan:
        parent = _context(context, span.parent_id, is_remote=is_own) if span.parent_id else None
        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        return ReadableSpan(
            span.name,
            context=_context(context, span.span_id),
            parent=parent,
            resource=self._resources[span.process],
            attributes=dict(span.facts),
            events=[
                Event(each.name, dict(each.facts), self._ns(each.at_s)) for each in span.events
            ],
            kind=SpanKind.SERVER if is_own else SpanKind.INTERNAL,
            status=status,
            start_time=self._ns(span.start_s),
            end_time=self._ns(span.end_s),
            instrumentation_scope=_SCOPE,
        )

    def _ns(self, seconds: float) -> int:
        return int((seconds + self._offset_s) * 1e9)


def _context(context: TraceContext, span_id: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )
