"""Finds stop strings and stop patterns in growing text, without ever retracting text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.protocol.errors import RequestError
from sylvan.text.markers import possible_start
from sylvan.text.patterns.compile import MAX_STATES, MAX_STEPS, PatternError
from sylvan.text.patterns.search import Automaton, PatternSearch, automaton_of

MAX_HELD_CHARS = 1024


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop that was found.

    pattern: The stop string or regular expression given by the client.
    start: Offset of its first character in the held text.
        end: Offset after its last character.
    """

    pattern: str
    start: int
    end: int


class StopFinder:
    """Searches growing text for stop strings, then for stop patterns.

    At most `MAX_HELD_CHARS` characters are held back: a longer match of a pattern (`a.*b`) still
    stops the output, which then ends where the held text starts. Each character takes at most as
    many steps as the patterns have states.

    Raises:
        RequestError: a pattern is not a regular expression, matches the empty text, cannot be
          matched incrementally, or all together have too many states.
    """

    def __init__(self, strings: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._strings = tuple(text for text in strings if text)
        self._searches = [(text, PatternSearch(found)) for text, found in _automata(patterns)]
        self._limit = max(MAX_HELD_CHARS, *map(len, self._strings), 0)
        self._held = ""
        self._passed = 0

    def __bool__(self) -> bool:
        return bool(self._strings or self._searches)

    @property
    def held(self) -> str:
        """Text that is held back."""
        return self._held

    def push(self, text: str) -> StopMatch | None:
        """Add text; return the stop that ends first in the held text, if any.

        Strings take precedence over patterns. Push nothing after a stop.
        """
        self._held += text
        matches = [(pattern, search.push(text)) for pattern, search in self._searches]
        hits = [
            StopMatch(text, start, start + len(text))
            for text in self._strings
            if (start := self._held.find(text)) >= 0
        ]
        if hits:
            return min(hits, key=lambda hit: (hit.end, hit.start))
        for pattern, found in matches:
            if found is not None:
                start, end = (max(place - self._passed, 0) for place in found)
                return StopMatch(pattern, start, end)
        return None

    def release(self) -> str:
        """Return the text in which no stop can start any more, and stop holding it."""
        start = possible_start(self._held, self._strings)
        for _, search in self._searches:
            if (pending := search.pending) is not None:
                start = min(start, max(pending - self._passed, 0))
        start = max(start, len(self._held) - self._limit)
        text, self._held = self._held[:start], self._held[start:]
        self._passed += start
        return text


def _automata(patterns: Sequence[str]) -> list[tuple[str, Automaton]]:
    made: list[tuple[str, Automaton]] = []
    size = steps = 0
    for text in patterns:
        if not text:
            continue
        try:
            found = automaton_of(text)
        except PatternError as error:
            raise RequestError(f"stop_regex {text!r} {error}.", param="stop_regex") from error
        if found.matches_empty:
            message = f"stop_regex {text!r} matches the empty text, so it would stop at once."
            raise RequestError(message, param="stop_regex")
        size, steps = size + found.size, steps + found.steps
        if size > MAX_STATES or steps > MAX_STEPS:
            message = f"stop_regex: all patterns together need more than {MAX_STATES} states."
            raise RequestError(message, param="stop_regex")
        made.append((text, found))
    return made
