"""Ends a stream that no worker can continue with an error in its API's format."""

from __future__ import annotations

import orjson

from sylvan.api.errors import Family, error_body
from sylvan.protocol.errors import CapacityError

SSE, NDJSON = "text/event-stream", "application/x-ndjson"


def error_tail(family: Family, media_type: str, error: CapacityError) -> bytes | None:
    """Return the last bytes of a cut-off stream; None if its format has no error events."""
    content = orjson.dumps(error_body(family, error.status, str(error)))
    kind = media_type.partition(";")[0].strip().lower()
    if kind == NDJSON:
        return content + b"\n"
    if kind != SSE:
        return None
    name = b"event: error\n" if family in (Family.ANTHROPIC, Family.RESPONSES) else b""
    return name + b"data: " + content + b"\n\n"
