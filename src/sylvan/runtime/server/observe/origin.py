"""Where a call comes from: its trace context, labels and peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sylvan.config.tree import ObserveConfig
from sylvan.runtime.server.observe.labels import allowed_labels, read_labels
from sylvan.runtime.tokenizer.types import Origin

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers that propagate a trace to another process (W3C)."""
LABELS_HEADER = "x-custom-labels"
_MAX_CHARS = 512  # size of a header, required by the standard for `tracestate`


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The arrival of a call.

    Attributes:
        name: Name of the call.
        received_s: Arrival time on the monotonic clock.
        headers: Headers with lower-case names.
        peer: Address of the client.
        extra: Fields of the body outside its type: SGLang's `external_trace_header` and
            `custom_labels` replace the headers.
    """

    name: str
    received_s: float
    headers: Mapping[str, str]
    peer: str
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


def origin_of(settings: ObserveConfig, arrival: Arrival) -> Origin:
    """Return the origin of a call's requests."""
    allowed = settings.custom_labels
    labels = read_labels(arrival.headers.get(LABELS_HEADER), allowed) if allowed else {}
    if allowed and "custom_labels" in arrival.extra:
        labels = {**labels, **allowed_labels(arrival.extra["custom_labels"], allowed)}
    headers: Mapping[str, Any] = arrival.headers
    if isinstance(given := arrival.extra.get("external_trace_header"), dict):
        headers = {str(name).lower(): value for name, value in given.items()}
    found = ((name, headers.get(name)) for name in TRACE_HEADERS)
    return Origin(
        name=arrival.name,
        received_s=arrival.received_s,
        trace={n: v for n, v in found if isinstance(v, str) and len(v) <= _MAX_CHARS},
        labels=labels,
        peer=arrival.peer,
    )
