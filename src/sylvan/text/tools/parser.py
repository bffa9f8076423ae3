"""Runs a grammar over text as it arrives."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sylvan.text.spans import TextSpan
from sylvan.text.tools.events import (
    ArgumentsDelta,
    Calls,
    CallStart,
    Event,
    TextDelta,
    ToolSpec,
)
from sylvan.text.tools.reader import Malformed, Reader, Steps

_PIECE_CHARS = 8192  # limits the text searched again after each marker
_MAX_FAILED = 256  # each false marker may cost a scan of all text


class ToolCallSyntax(Protocol):
    """How a model family writes calls."""

    @property
    def bare(self) -> Sequence[str]:
        """Forms of calls at the start of the output, without a marker."""
        ...

    @property
    def markers(self) -> Sequence[str]:
        """Markers to look for in the text."""
        ...

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        """Read the calls after a marker.

        Raises:
            Malformed: they are not calls; uncommitted text is returned as text.
        """
        ...


class ToolParser:
    """Finds the calls in one output.

    The joined events do not depend on how the text was split. Text that is not a complete call is
    returned as text; incomplete calls keep the events so far. After 256 markers without
    a call, the rest is text. Raises no errors.

    Args:
        grammar: How calls are written.
        tools: Callable functions. Calls of others stay text; None allows any name.
    """

    def __init__(self, grammar: ToolCallSyntax, tools: Collection[ToolSpec] | None = None) -> None:
        self._reader = Reader()
        self._calls = Calls(self._reader, tools)
        self._grammar = grammar
        self._steps = self._run()
        self._after_call = False
        self._failed = 0
        self._finished = False

    def feed(self, text: str) -> list[Event]:
        """Add text; return new events."""
        if not text or self._finished:
            return []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """End the output; return what was held back."""
        if self._finished:
            return []
        self._reader.end()
        events = self._advance()
        self._finished = True
        return events

    def spans(self) -> list[TextSpan]:
        """Positions in the output of the text of the events since the last call."""
        return self._calls.spans()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        return self._calls.take()

    def _run(self) -> Steps[None]:
        reader, calls, grammar = self._reader, self._calls, self._grammar
        if grammar.bare and (yield from reader.lookahead(grammar.bare)):
            yield from self._attempt("")
        while self._failed < _MAX_FAILED:
            marker = yield from reader.seek(
                grammar.markers, calls.text, after_call=self._after_call
            )
            if not marker:
                return
            yield from self._attempt(marker)
        yield from reader.seek((), calls.text, after_call=False)

    def _attempt(self, marker: str) -> Steps[None]:
        before = self._calls.count
        try:
            yield from self._grammar.read(marker, self._reader, self._calls)
        except Malformed:
            self._calls.give_back()
            self._after_call = False
            self._calls.stays_text = self._calls.count == before
            self._failed += 1
            return
        self._after_call = self._calls.count > before
        if self._after_call:
            self._reader.commit()
        else:  # no function of the request was called
            self._calls.give_back()
            self._failed += 1


@dataclass(slots=True)
class ToolCall:
    """One call: the function's name and its arguments as JSON text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedTools:
    """The text and the calls of a whole output."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add a parser's events."""
        for event in events:
            if isinstance(event, TextDelta):
                self.text += event.text
            elif isinstance(event, CallStart):
                self.calls.append(ToolCall(event.name))
            elif isinstance(event, ArgumentsDelta):
                self.calls[event.index].arguments += event.fragment


def parse(
    text: str, grammar: ToolCallSyntax, tools: Collection[ToolSpec] | None = None
) -> ParsedTools:
    """Split a whole output into text and calls, with the same code as a stream."""
    result = ParsedTools()
    parser = ToolParser(grammar, tools)
    for start in range(0, len(text), _PIECE_CHARS):
        result.add(parser.feed(text[start : start + _PIECE_CHARS]))
    result.add(parser.finish())
    return result


def is_complete(call: ToolCall) -> bool:
    """Whether the arguments are a complete JSON object."""
    try:
        return isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return False
