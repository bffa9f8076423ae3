"""Decompresses request bodies (`Content-Encoding`)."""

from __future__ import annotations

import zlib

from sylvan.protocol.errors import RequestError

_CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # window bits, as zlib defines them


def decompress(data: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompress a body; returns `max_bytes + 1` bytes if it is larger than that.

    Args:
        data: The body as received.
        coding: Value of the header; empty: not compressed.
        max_bytes: Limit of the decompressed body.

    Raises:
        RequestError: The coding is unknown (415), or the body is not valid in it.
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
