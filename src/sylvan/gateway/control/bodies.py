"""Decodes the bodies of the gateway's own routes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.malformed import MALFORMED

T = TypeVar("T")


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body into a type.

    Raises:
        RequestError: The body does not match; the message names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise malformed(error) from error
    except MALFORMED as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error


def malformed(error: msgspec.ValidationError) -> RequestError:
    """Build the error for a value that does not match its type."""
    message, _, path = str(error).partition(" - at ")
    param = path.strip("`$.") or None
    return RequestError(f"{param or 'body'}: {message}.", param=param)
