"""The interface between serving and tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers that propagate a trace to another process (W3C)."""


class TraceSpan(Protocol):
    """The trace span of one request."""

    def headers(self) -> Sequence[tuple[str, str]] | None:
        """Headers that make workers' spans children of this one; None: forward the client's."""
        ...

    def event(self, name: str, facts: Mapping[str, str | int | float]) -> None:
        """Record an event."""
        ...

    def end(self, status: int, facts: Mapping[str, str | int | float]) -> None:
        """End the span with this HTTP status."""
        ...


class NoSpan:
    """The span of an untraced request."""

    def headers(self) -> Sequence[tuple[str, str]] | None:
        return None

    def event(self, name: str, facts: Mapping[str, str | int | float]) -> None:
        pass

    def end(self, status: int, facts: Mapping[str, str | int | float]) -> None:
        pass


class Tracing(Protocol):
    """Starts spans."""

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceSpan:
        """Start a span for a request, as a child of the client's span if `headers` name one."""
        ...


class NoTracing:
    """Tracing that is switched off."""

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceSpan:
        return NoSpan()
