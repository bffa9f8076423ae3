"""Encodes a program's images for requests."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any


def encode_image(source: Any) -> str:
    """Return the base64 of an image, or its URL unchanged.

    Args:
        source: Path, http(s) URL, bytes of an image file, or a PIL image.

    Raises:
        OSError: The file is unreadable.
        TypeError: Another type.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    if isinstance(source, str | Path):
        return base64.b64encode(Path(source).read_bytes()).decode()
    if isinstance(source, bytes | bytearray):
        return base64.b64encode(source).decode()
    if not hasattr(source, "save"):
        raise TypeError(f"an image is a path, URL, bytes or PIL image, not {type(source)}")
    buffer = io.BytesIO()
    source.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def encode_images(given: Any) -> Any:
    """Encode the images in nested lists; leave text that names no file unchanged.

    Raises:
        OSError: A file is unreadable.
        TypeError: Something is not an image.
    """
    if given is None or isinstance(given, dict):
        return given
    if isinstance(given, list | tuple):
        return [encode_images(item) for item in given]
    if isinstance(given, str) and not _names_file(given):
        return given
    return encode_image(given)


def _names_file(text: str) -> bool:
    return len(text) < 4096 and "\0" not in text and Path(text).is_file()
