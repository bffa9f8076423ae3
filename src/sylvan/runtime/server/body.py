"""Request bodies: bounded while they stream in, JSON only, strictly decoded."""

from __future__ import annotations

import zlib
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sylvan.api.strict_json import decode_json
from sylvan.protocol.errors import RequestError

_CHARSETS = ("utf-8", "utf8", "us-ascii")
_CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # as zlib's window bits say them


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, if it is not larger than `max_bytes`.

    Raises:
        RequestError: With status 413, as soon as the limit is passed, or is announced to be.
        ClientGoneError: The client left before the end.
    """
    expected = request.headers.get("expect", "")
    if expected and expected.strip().lower() != "100-continue":
        raise RequestError(f"Expect: only 100-continue is met, not {expected[:40]!r}.", status=417)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    coding = request.headers.get("content-encoding", "").strip().lower()
    return data if coding in ("", "identity") else _unpacked(data, coding, max_bytes)


async def read_json(request: Request, max_bytes: int, *, typed: bool) -> Any:
    """The body as JSON; `typed` asks for a JSON content type.

    Raises:
        RequestError: The body is too large (413), of another type, or not strict JSON.
        ClientGoneError: The client left before the end.
    """
    if typed:
        check_content_type(request)
    return decode_json(await read_body(request, max_bytes))


def check_content_type(request: Request) -> None:
    """Refuse a body that is not announced as JSON.

    Raises:
        RequestError: With status 400.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        shown = f"not {given[:80]!r}" if given else "but is missing"
        raise RequestError(f"Content-Type must be application/json, {shown}.")


def check_charset(request: Request) -> None:
    """Refuse a body that is announced in another encoding than UTF-8.

    Raises:
        RequestError: With status 415.
    """
    for parameter in request.headers.get("content-type", "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _CHARSETS:
            message = f"Content-Type: expected charset utf-8, not {charset[:40]!r}."
            raise RequestError(message, status=415)


def _unpacked(data: bytes, coding: str, max_bytes: int) -> bytes:
    """A compressed body; the limit is on what it holds."""
    wbits = _CODINGS.get(coding)
    if wbits is None:
        message = f"Content-Encoding: expected gzip or deflate, not {coding[:40]!r}."
        raise RequestError(message, status=415)
    reader = zlib.decompressobj(wbits)
    try:
        found = reader.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"The body is not valid {coding}: {error}.") from error
    if len(found) > max_bytes:
        raise _too_large(max_bytes)
    if not reader.eof:
        raise RequestError(f"The body is not valid {coding}: it ends too early.")
    return found


def _too_large(max_bytes: int) -> RequestError:
    shown = f"{max_bytes / 2**20:g} MiB"
    message = f"The body is larger than {shown} ({max_bytes} bytes), the limit of this server."
    return RequestError(message, status=413)
