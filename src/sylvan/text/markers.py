"""Finds possible markers at the end of incomplete text."""

from __future__ import annotations

from collections.abc import Sequence


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Offset from which the text may still become one of the markers; its length if it cannot.

    Only proper prefixes at the end of the text count, not markers that are complete.
    """
    longest = max(map(len, markers), default=0)
    beginnings = {marker[0] for marker in markers}
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if text[start] not in beginnings:
            continue
        tail = text[start:]
        if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
            return start
    return len(text)
