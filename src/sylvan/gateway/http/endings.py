"""How a stream ends that nobody goes on with: with an error in the shape of its family."""

from __future__ import annotations

import orjson

from sylvan.api.errors import Family, error_body
from sylvan.protocol.errors import CapacityError

SSE, NDJSON = "text/event-stream", "application/x-ndjson"


def error_tail(family: Family, media_type: str, error: CapacityError) -> bytes | None:
    """The last bytes of a stream that was cut; None if its type has no room for an error."""
    content = orjson.dumps(error_body(family, error.status, str(error)))
    kind = media_type.partition(";")[0].strip().lower()
    if kind == NDJSON:
        return content + b"\n"
    if kind != SSE:
        return None
    name = b"event: error\n" if family in (Family.ANTHROPIC, Family.RESPONSES) else b""
    return name + b"data: " + content + b"\n\n"
