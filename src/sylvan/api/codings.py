"""Compressed bodies of requests (`Content-Encoding`)."""

from __future__ import annotations

import zlib

from sylvan.protocol.errors import RequestError

_CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # as zlib's window bits say them


def unpacked(data: bytes, coding: str, max_bytes: int) -> bytes:
    """A body without its coding; one byte more than `max_bytes` if it holds more than that.

    Args:
        data: As it came.
        coding: The header's value; empty: there is none.
        max_bytes: Of what it may hold.

    Raises:
        RequestError: The coding is not known (status 415), or the body is not in it.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return data
    wbits = _CODINGS.get(name)
    if wbits is None:
        message = f"Content-Encoding: expected gzip or deflate, not {name[:40]!r}."
        raise RequestError(message, status=415)
    reader = zlib.decompressobj(wbits)
    try:
        found = reader.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"The body is not valid {name}: {error}.") from error
    if len(found) <= max_bytes and not reader.eof:
        raise RequestError(f"The body is not valid {name}: it ends too early.")
    return found
