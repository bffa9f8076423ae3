"""The source of a media item, as given in a request."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MediaKind

FRAMES = "video:"
"""Prefix before the base64 of concatenated JPEG files: how SGLang programs send videos."""

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+=-]+)*),", re.ASCII)
_ADDRESS = re.compile(r"(https?|file)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One item of a request.

    Attributes:
        kind: Image, video or audio.
        path: Its path in the body.
        data: Its bytes; None: see `url`.
        url: An `http`, `https` or `file` address.
        options: Processor options, such as `max_pixels`.
    """

    kind: MediaKind
    path: str
    data: bytes | None = None
    url: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def read_source(
    kind: MediaKind, given: object, path: str, options: dict[str, Any] | None = None
) -> MediaSource:
    """Parse a string in a body: a URL, a data URL, or base64, including video frames.

    Args:
        kind: Kind of the item.
        given: The string, or bytes.
        path: Its path in the body.
        options: Processor options.

    Raises:
        RequestError: It is none of these; the message names the path.
    """
    extra = options or {}
    if isinstance(given, bytes):
        return MediaSource(kind, path, given, options=extra)
    if not isinstance(given, str) or not given:
        raise RequestError(f"{path}: expected an address, a data URL or base64.", param=path)
    if _ADDRESS.match(given):
        return MediaSource(kind, path, url=given, options=extra)
    if kind == "video" and given.startswith(FRAMES):
        return MediaSource(kind, path, decode_base64(given[len(FRAMES) :], path), options=extra)
    if given.startswith("data:"):
        return MediaSource(kind, path, _of_data_url(kind, given, path), options=extra)
    return MediaSource(kind, path, decode_base64(given, path), options=extra)


def decode_base64(text: str, path: str) -> bytes:
    """Decode base64.

    Raises:
        RequestError: It is not base64; the message names the path.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        shown = text[:40]
        message = f"{path}: {shown!r} is neither an address nor a data URL nor base64."
        raise RequestError(message, param=path) from error


def _of_data_url(kind: MediaKind, url: str, path: str) -> bytes:
    found = _DATA_URL.match(url[:256])
    if found is None or not found[2].endswith(";base64"):
        raise RequestError(
            f"{path}: a data URL must have the form data:TYPE;base64,...", param=path
        )
    kinds = (f"{kind}/", "application/octet-stream", *(("video/",) if kind == "audio" else ()))
    if found[1] and not found[1].startswith(kinds):
        raise RequestError(f"{path}: expected {kind}/..., not {found[1][:40]!r}.", param=path)
    return decode_base64(url[found.end() :], path)
