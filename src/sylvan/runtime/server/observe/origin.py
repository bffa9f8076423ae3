"""What a call says of where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sylvan.config.tree import ObserveConfig
from sylvan.runtime.server.observe.labels import allowed_labels, read_labels
from sylvan.runtime.tokenizer.types import Origin

TRACE_HEADERS = ("traceparent", "tracestate")
"""By which a trace goes on in another process (W3C)."""
LABELS_HEADER = "x-custom-labels"
_MAX_CHARS = 512  # of a header, as the standard demands of `tracestate`


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A call that came.

    Attributes:
        name: Of the call.
        received_s: When, on the monotonic clock.
        headers: With small letters.
        peer: Address of the caller.
        extra: Fields of the body that its model does not list: SGLang's `external_trace_header`
            and `custom_labels` stand for the headers.
    """

    name: str
    received_s: float
    headers: Mapping[str, str]
    peer: str
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


def origin_of(settings: ObserveConfig, arrival: Arrival) -> Origin:
    """The origin of the requests of a call."""
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
