"""Server-sent events and JSON lines."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00hole\x00"

_OPTIONS = orjson.OPT_NON_STR_KEYS


def encode(content: Any) -> bytes:
    """Encode JSON on one line; escapes U+0085, U+2028 and U+2029, which some clients split at."""
    data = orjson.dumps(content, option=_OPTIONS)
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data.replace(b"\xc2\x85", b"\\u0085") if b"\xc2\x85" in data else data


def event(content: Any) -> bytes:
    """Encode one event."""
    return b"data: " + encode(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """Encode one named event, as Anthropic and Responses clients expect."""
    return b"event: " + name.encode() + b"\ndata: " + encode(content) + b"\n\n"


def line(content: Any) -> bytes:
    """Encode one JSON line, as Ollama clients expect."""
    return encode(content) + b"\n"


class EventTemplate:
    """An event in which only one string varies; the rest is encoded once.

    Args:
        content: The event, with `placeholder` in place of the string.
        placeholder: A string that occurs once in `content`.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, content: Any, placeholder: str = PLACEHOLDER) -> None:
        encoded = event(content)
        self._head, found, self._tail = encoded.partition(orjson.dumps(placeholder))
        assert found, "the placeholder is missing"

    def fill(self, text: str) -> bytes:
        """Return the event with `text` in place of the placeholder."""
        return self._head + encode(text) + self._tail
