"""What is told of a request while it is served, for whoever traces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

TRACE_HEADERS = ("traceparent", "tracestate")
"""By which a trace goes on in another process (W3C)."""


class TraceSpan(Protocol):
    """One request in a trace."""

    def headers(self) -> Sequence[tuple[str, str]] | None:
        """By which spans of workers become children of this one; None: the client's stay."""
        ...

    def event(self, name: str, facts: Mapping[str, str | int | float]) -> None:
        """Something happened."""
        ...

    def end(self, status: int, facts: Mapping[str, str | int | float]) -> None:
        """The request is over, with this status of HTTP."""
        ...


class NoSpan:
    """Of a request that is not traced."""

    def headers(self) -> Sequence[tuple[str, str]] | None:
        return None

    def event(self, name: str, facts: Mapping[str, str | int | float]) -> None:
        pass

    def end(self, status: int, facts: Mapping[str, str | int | float]) -> None:
        pass


class Tracing(Protocol):
    """Begins spans."""

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceSpan:
        """A span for a request, as a child of the client's if `headers` name one."""
        ...


class NoTracing:
    """Traces nothing."""

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceSpan:
        return NoSpan()
