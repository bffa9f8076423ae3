"""Records metrics of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.observe.metrics import GatewayMetrics, RouterMetrics
from sylvan.protocol.journal import Totals
from sylvan.utils.clock import Clock

MAX_MODELS = 256
"""Limit of distinct model labels; further names count as `other`, since clients choose them."""


@dataclass(frozen=True, slots=True)
class RouteLabels:
    """The labels that most metrics share."""

    router_type: str
    backend_type: str
    connection_mode: str
    model_id: str
    endpoint: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the values in the order of the labels."""
        return (
            self.router_type,
            self.backend_type,
            self.connection_mode,
            self.model_id,
            self.endpoint,
        )


class RequestMeter:
    """Durations and counts of one forwarded request."""

    def __init__(
        self, metrics: GatewayMetrics, route: RouteLabels, clock: Clock, *, stream: bool
    ) -> None:
        self._metrics: RouterMetrics = metrics.router
        self._labels = route.labels
        self._router_type = route.router_type
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._metrics.requests.labels(*self._labels, str(stream).lower()).inc()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._began

    def answered(self, status: int) -> None:
        """Record that a worker answered."""
        self._metrics.upstream.labels(self._router_type, str(status)).inc()

    def first_byte(self) -> None:
        """Record that the client got the first byte."""
        if self._first is None:
            self._first = self._clock()
            self._metrics.ttft.labels(*self._labels).observe(self._first - self._began)

    def failed(self, error: Exception) -> None:
        """Record that the request failed."""
        kind = error.kind if isinstance(error, UpstreamError) else type(error).__name__
        self._metrics.errors.labels(*self._labels, kind).inc()

    def continued(self) -> None:
        """Record that another worker continues the stream."""
        self._metrics.continued.inc()

    def cut(self) -> None:
        """Record that no worker can continue the stream."""
        self._metrics.cut.inc()

    def done(self, totals: Totals) -> None:
        """Record that the last byte was sent."""
        now = self._clock()
        metrics, labels = self._metrics, self._labels
        metrics.duration.labels(*labels).observe(now - self._began)
        for kind, count in (
            ("input", totals.prompt_tokens),
            ("output", totals.completion_tokens),
            ("cached", totals.cached_tokens),
        ):
            if count:
                metrics.tokens.labels(*labels, kind).inc(count)
        if self._first is not None:
            metrics.generation.labels(*labels).observe(now - self._first)
            if totals.completion_tokens > 1:
                tpot_s = (now - self._first) / (totals.completion_tokens - 1)
                metrics.tpot.labels(*labels).observe(tpot_s)


@dataclass(slots=True)
class ModelNames:
    """Model names as labels: bounded, whatever clients send."""

    known: set[str] = field(default_factory=set[str])

    def label(self, model: str | None) -> str:
        """Return the label of a model."""
        if not model:
            return "unknown"
        if model not in self.known:
            if len(self.known) >= MAX_MODELS:
                return "other"
            self.known.add(model)
        return model
