"""Finds stop strings and stop patterns in text that grows, without ever taking text back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from sylvan.protocol.errors import RequestError
from sylvan.text.markers import possible_start

MAX_HELD_CHARS = 1024
_LOOKBEHIND_CHARS = 256
_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop that was found.

    Attributes:
        pattern: The stop string or the regular expression, as the client gave it.
        start: Offset of its first character in the text looked at.
        end: Offset after its last character.
    """

    pattern: str
    start: int
    end: int


class StopFinder:
    """Searches growing text for stop strings, then for stop patterns.

    Text before `MAX_HELD_CHARS` from the end is never waited for: a pattern that could go on for
    ever (`a.*b`) matches within that window only.

    Raises:
        RequestError: A pattern is not a regular expression, or matches the empty text.
    """

    def __init__(self, strings: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._strings = tuple(text for text in strings if text)
        self._patterns = tuple((text, _compile(text)) for text in patterns if text)
        self._limit = max(MAX_HELD_CHARS, *map(len, self._strings), 0)
        self._before = ""

    def __bool__(self) -> bool:
        return bool(self._strings or self._patterns)

    def search(self, held: str) -> StopMatch | None:
        """Find the stop that ends first in the text held back; strings win over patterns."""
        hits = [
            StopMatch(text, start, start + len(text))
            for text in self._strings
            if (start := held.find(text)) >= 0
        ]
        if hits:
            return min(hits, key=lambda hit: (hit.end, hit.start))
        for text, pattern in self._patterns:
            found = _search(pattern, self._before + held, len(self._before))
            if found and not found.partial and found.end() > found.start():
                offset = len(self._before)
                return StopMatch(text, found.start() - offset, found.end() - offset)
        return None

    def keep_from(self, held: str) -> int:
        """Offset from which the text has to be held back, given that `search` found nothing."""
        start = possible_start(held, self._strings)
        for _, pattern in self._patterns:
            found = _search(pattern, self._before + held, len(self._before))
            if found:
                start = min(start, found.start() - len(self._before))
        return max(start, len(held) - self._limit)

    def passed(self, text: str) -> None:
        """Remember text that was let go, for patterns that look behind."""
        if self._patterns:
            self._before = (self._before + text)[-_LOOKBEHIND_CHARS:]


def _compile(text: str) -> regex.Pattern[str]:
    try:
        pattern = regex.compile(text)
    except regex.error as error:
        raise RequestError(
            f"stop_regex {text!r} is not a valid regular expression: {error}.", param="stop_regex"
        ) from error
    if _search(pattern, "", 0, partial=False):
        raise RequestError(
            f"stop_regex {text!r} matches the empty text, so it would stop at once.",
            param="stop_regex",
        )
    return pattern


def _search(
    pattern: regex.Pattern[str], text: str, start: int, *, partial: bool = True
) -> regex.Match[str] | None:
    try:
        return pattern.search(text, pos=start, partial=partial, timeout=_TIMEOUT_S)
    except TimeoutError as error:
        raise RequestError(
            f"stop_regex {pattern.pattern!r} takes more than {_TIMEOUT_S:g} s to match.",
            param="stop_regex",
        ) from error
