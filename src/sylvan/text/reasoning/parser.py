"""The incremental parser behind all reasoning families."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from sylvan.text.markers import possible_start
from sylvan.text.reasoning.blocks import BlockReasoning
from sylvan.text.reasoning.channels import ChannelReasoning
from sylvan.text.reasoning.families import ReasoningFamily
from sylvan.text.spans import SpanLog, TextSpan

Split = tuple[str, str]


class ReasoningParser(Protocol):
    """Splits one output as it arrives.

    The joined results do not depend on how the text was split. Only the markers and the white space
    next to them are dropped.
    """

    def feed(self, text: str) -> Split:
        """Add text; return the new `(reasoning, content)`."""
        ...

    def finish(self) -> Split:
        """End the output; return what was held back."""
        ...

    def spans(self) -> list[TextSpan]:
        """Positions in the output of the text returned since the last call, in order."""
        ...


class _Place(Enum):
    BEFORE = auto()
    THINKING = auto()
    GAP = auto()
    ANSWER = auto()


class MarkedReasoning:
    """Thinking between two markers, at the start of the output.

    Args:
        family: The markers.
        start_in_reasoning: The output continues thinking; a start marker may still come first.
    """

    def __init__(self, family: ReasoningFamily, *, start_in_reasoning: bool) -> None:
        self._family = family
        self._forced = start_in_reasoning
        self._stops = (*family.ends, *family.interrupts)
        self._place = _Place.BEFORE
        self._held = ""
        self._at = 0  # position of the held text in the output
        self._at_first = True
        self._spans = SpanLog()

    def feed(self, text: str) -> Split:
        self._held += text
        reasoning = content = ""
        if self._place is _Place.BEFORE:
            self._enter()
        if self._place is _Place.THINKING:
            reasoning = self._think()
        if self._place is _Place.GAP:
            self._skip_to(self._held.lstrip())
            self._place = _Place.ANSWER if self._held else _Place.GAP
        if self._place is _Place.ANSWER:
            content = self._answer(possible_start(self._held, self._family.drops))
        return reasoning, content

    def finish(self) -> Split:
        held, self._held = self._held, ""
        if self._place is _Place.GAP:
            return "", ""
        thinking = self._place is _Place.THINKING or (self._place is _Place.BEFORE and self._forced)
        if not thinking and self._family.drops:
            self._held = held
            return "", self._answer(len(held))
        self._spans.add(self._at, len(held), thinking=thinking)
        return (held, "") if thinking else ("", held)

    def spans(self) -> list[TextSpan]:
        return self._spans.take()

    def _answer(self, stop: int) -> str:
        """Text up to an offset, without surrounding markers."""
        pieces: list[str] = []
        while True:
            found = [(at, m) for m in self._family.drops if 0 <= (at := self._held.find(m)) < stop]
            end, mark = min(found, default=(stop, ""))
            pieces.append(self._held[:end])
            self._spans.add(self._at, end)
            self._skip_to(self._held[end + len(mark) :])
            stop -= end + len(mark)
            if not mark:
                return "".join(pieces)

    def _skip_to(self, rest: str) -> None:
        """Drop the held text except its end."""
        self._at += len(self._held) - len(rest)
        self._held = rest

    def _enter(self) -> None:
        begin = self._held.lstrip()
        # white space may precede a marker
        for text in (self._held, begin):
            if marker := _prefix_of(text, self._family.starts):
                self._skip_to(text[len(marker) :])
                self._place = _Place.THINKING
                return
        strays = self._family.ends if self._family.stray_end and not self._forced else ()
        if stray := _prefix_of(begin, strays):
            self._skip_to(begin[len(stray) :])
            self._place = _Place.GAP
            return
        options = (*self._family.starts, *strays)
        if not any(option.startswith((begin, self._held)) for option in options):
            self._place = _Place.THINKING if self._forced else _Place.ANSWER

    def _think(self) -> str:
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, stop = min(found, key=lambda item: (item[0], -len(item[1])))
            text = self._held[:end].rstrip()
            rest = end + (0 if stop in self._family.interrupts else len(stop))
            self._place = _Place.GAP
        else:
            end = possible_start(self._held, self._stops)
            text = self._held[:end].rstrip()
            rest = len(text)
        start = self._at
        self._skip_to(self._held[rest:])
        if self._at_first:
            start += len(text) - len(text.lstrip())
            text = text.lstrip()
            self._at_first = not text
        self._spans.add(start, len(text), thinking=True)
        return text


class TaggedAnswer:
    """Keeps thinking in the answer, with the start marker prepended."""

    def __init__(self, family: ReasoningFamily) -> None:
        self._prefix = family.starts[0]
        self._at = 0
        self._spans = SpanLog()

    def feed(self, text: str) -> Split:
        self._spans.add(self._at, len(text))
        self._at += len(text)
        if text:
            text, self._prefix = self._prefix + text, ""
        return "", text

    def finish(self) -> Split:
        return "", ""

    def spans(self) -> list[TextSpan]:
        return self._spans.take()


def make_parser(family: ReasoningFamily, *, start_in_reasoning: bool) -> ReasoningParser:
    """A new parser for one output; see `ReasoningFamily.starts_in_reasoning`."""
    if family.channels is not None:
        return ChannelReasoning(family.channels, start_in_reasoning=start_in_reasoning)
    if family.inner_call is not None:
        start, end = family.starts[0], family.ends[0]
        call = family.inner_call
        return BlockReasoning(start, end, call, start_in_reasoning=start_in_reasoning)
    if family.keeps_tags:
        return TaggedAnswer(family)
    return MarkedReasoning(family, start_in_reasoning=start_in_reasoning)


def separate(text: str, family: ReasoningFamily, *, start_in_reasoning: bool) -> Split:
    """Split a whole output into `(reasoning, content)`."""
    parser = make_parser(family, start_in_reasoning=start_in_reasoning)
    first, last = parser.feed(text), parser.finish()
    return first[0] + last[0], first[1] + last[1]


def _prefix_of(text: str, markers: tuple[str, ...]) -> str:
    return max((m for m in markers if text.startswith(m)), key=len, default="")
