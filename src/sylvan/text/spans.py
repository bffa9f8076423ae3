"""Positions of visible text in a model's output."""

from __future__ import annotations

from typing import NamedTuple


class TextSpan(NamedTuple):
    """Characters `start` to `stop` of an output; `thinking` says which kind of text."""

    start: int
    stop: int
    thinking: bool = False


class SpanLog:
    """Collects spans in output order; merges adjacent spans of a kind."""

    def __init__(self) -> None:
        self._spans: list[TextSpan] = []

    def add(self, start: int, length: int, *, thinking: bool = False) -> None:
        """Add `length` characters at `start`."""
        if not length:
            return
        last = self._spans[-1] if self._spans else None
        if last is not None and last.stop == start and last.thinking == thinking:
            self._spans[-1] = TextSpan(last.start, start + length, thinking)
        else:
            self._spans.append(TextSpan(start, start + length, thinking))

    def take(self) -> list[TextSpan]:
        """The spans added since the last call."""
        taken, self._spans = self._spans, []
        return taken


class SpanMap:
    """Maps positions of a joined text to positions of the text whose spans were joined."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, int]] = []  # position here, position there, length
        self._length = 0

    def extend(self, text: str, spans: list[TextSpan]) -> None:
        """Append a text that ends with the spans; any excess in front belongs to no span."""
        place = self._length + len(text) - sum(span.stop - span.start for span in spans)
        for span in spans:
            here, there, length = self._parts[-1] if self._parts else (0, -1, 0)
            if here + length == place and there + length == span.start:
                self._parts[-1] = (here, there, length + span.stop - span.start)
            else:
                self._parts.append((place, span.start, span.stop - span.start))
            place += span.stop - span.start
        self._length = place

    def find(self, span: TextSpan) -> list[TextSpan]:
        """The positions of a span; spans must be queried in order."""
        while len(self._parts) > 1 and self._parts[1][0] <= span.start:
            del self._parts[0]
        found: list[TextSpan] = []
        for here, there, length in self._parts:
            start, stop = max(here, span.start), min(here + length, span.stop)
            if start < stop:
                found.append(TextSpan(there + start - here, there + stop - here, span.thinking))
        return found
