"""Bodies of the gateway's own routes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.malformed import MALFORMED

T = TypeVar("T")


def decoded(body: bytes, kind: type[T]) -> T:
    """A body of a known form.

    Raises:
        RequestError: It is of another form; names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise malformed(error) from error
    except MALFORMED as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error


def malformed(error: msgspec.ValidationError) -> RequestError:
    """What a client is told of a value that does not fit."""
    message, _, path = str(error).partition(" - at ")
    param = path.strip("`$.") or None
    return RequestError(f"{param or 'body'}: {message}.", param=param)
