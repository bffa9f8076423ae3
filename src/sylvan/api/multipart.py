"""Multipart forms, which clients send to upload files (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sylvan.protocol.errors import RequestError

MAX_PARTS = 64

_BOUNDARY = re.compile(r'boundary="?([^";\s]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(r';\s*name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r';\s*filename="([^"]*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form; `filename` is None unless it is a file."""

    content: bytes
    filename: str | None


def parse_form(content_type: str, body: bytes) -> dict[str, Part]:
    """Parse the fields of a form; values of a field `name[]` that comes again are joined by commas.

    Raises:
        RequestError: It is malformed or truncated.
    """
    pieces = _pieces(content_type, body)
    parts: dict[str, Part] = {}
    for piece in pieces[1:-1]:
        head, separator, content = piece.partition(b"\r\n\r\n")
        text = head.decode("utf-8", "replace")
        name = _NAME.search(text)
        if not separator or name is None:
            raise RequestError("A part of the form has no name.")
        filename = _FILENAME.search(text)
        if name[1].endswith("[]") and name[1] in parts:
            content = parts[name[1]].content + b"," + content
        parts[name[1]] = Part(content, filename[1] if filename else None)
    return parts


def with_field(content_type: str, body: bytes, field: str, value: str) -> bytes:
    """Replace the value of a field that a form has.

    Raises:
        RequestError: It is malformed or truncated.
    """
    pieces = _pieces(content_type, body)
    for index, piece in enumerate(pieces):
        head, _, _ = piece.partition(b"\r\n\r\n")
        name = _NAME.search(head.decode("utf-8", "replace"))
        if name is not None and name[1] == field:
            pieces[index] = head + b"\r\n\r\n" + value.encode()
    return (b"\r\n" + _mark(content_type)).join(pieces)[2:]


def _pieces(content_type: str, body: bytes) -> list[bytes]:
    """Split a body at the boundaries."""
    pieces = (b"\r\n" + body).split(b"\r\n" + _mark(content_type))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise RequestError("The form is not complete.")
    if len(pieces) - 2 > MAX_PARTS:
        raise RequestError(f"The form has more than {MAX_PARTS} parts.")
    return pieces


def _mark(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise RequestError("Content-Type must be multipart/form-data with a boundary.")
    return b"--" + found[1].encode()
