"""Builds the observers of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.config.tree import ObserveConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.observe.request_log import RequestLog
from sylvan.runtime.server.observe.traces import KEPT, RequestTrace, Traces
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.utils.clock import Clock, unix_time


class ClosingExport(Protocol):
    """Exports traces; must be closed."""

    def __call__(self, trace: RequestTrace) -> None:
        """Queue a trace for export."""
        ...

    async def close(self) -> None:
        """Flush the remaining traces."""
        ...


@dataclass(frozen=True, slots=True)
class Observing:
    """Traces and logs of requests."""

    traces: Traces
    log: RequestLog
    export: ClosingExport | None

    async def close(self) -> None:
        """Flush the remaining traces, and close files."""
        self.log.close()
        if self.export is not None:
            await self.export.close()


def observe(
    engine: TokenizerManager, settings: ObserveConfig, model: str, clock: Clock
) -> Observing:
    """Start observing the requests of an engine.

    Raises:
        ConfigError: A directory is not writable, or a package is missing.
    """
    export = _export(settings, clock) if settings.trace else None
    traces = Traces(KEPT, export, model)
    log = RequestLog(settings, engine.tokenizer, traces)
    router = engine.router
    router.admitted += [traces.admitted, log.admitted]
    router.observers += [log.ended, traces.ended]
    return Observing(traces, log, export)


def _export(settings: ObserveConfig, clock: Clock) -> ClosingExport:
    try:
        from sylvan.runtime.server.observe.export import SpanExport  # needs an extra

        return SpanExport(
            settings.trace_endpoint,
            settings.trace_service,
            clock,
            unix_time(),
        )
    except ImportError as error:
        raise ConfigError(f"observe.trace: {error}: pip install 'sylvan[trace]'") from error
