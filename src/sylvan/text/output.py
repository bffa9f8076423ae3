"""Splits model output into thinking, answer and tool calls while it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sylvan.text.reasoning import ReasoningFamily, ReasoningParser, make_parser
from sylvan.text.spans import SpanLog, SpanMap, TextSpan
from sylvan.text.tools import (
    ArgumentsDelta,
    CallStart,
    TextDelta,
    ToolFamily,
    ToolParser,
    ToolSpec,
)


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Thinking."""

    text: str


Piece = ReasoningDelta | TextDelta | CallStart | ArgumentsDelta


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the outputs of a request.

    Attributes:
        reasoning: Format of thinking; None leaves it in the text.
        starts_in_reasoning: Whether the prompt ends within thinking.
        stream_reasoning: Whether to return thinking as it arrives, instead of at its end.
        tools: Format of tool calls; None leaves them in the text.
        specs: Callable functions.
        parallel: Whether to return more than one call.
    """

    reasoning: ReasoningFamily | None = None
    starts_in_reasoning: bool = False
    stream_reasoning: bool = True
    tools: ToolFamily | None = None
    specs: Sequence[ToolSpec] = ()
    parallel: bool = True

    @property
    def plain(self) -> bool:
        """Whether all text is answer."""
        return self.reasoning is None and self.tools is None


class OutputReader:
    """Parses one sample. The result does not depend on how the text was split."""

    def __init__(self, rules: OutputRules) -> None:
        self._thinking: ReasoningParser | None = None
        if rules.reasoning is not None:
            self._thinking = make_parser(
                rules.reasoning, start_in_reasoning=rules.starts_in_reasoning
            )
        self._calls = ToolParser(rules.tools.grammar, rules.specs) if rules.tools else None
        self._parallel = rules.parallel
        self._stream_reasoning = rules.stream_reasoning
        self._held = ""
        self._spans = SpanLog()
        self._answered = SpanMap()
        self._length = 0
        self.has_calls = False

    def feed(self, text: str) -> list[Piece]:
        """Add text; return the new output."""
        self._length += len(text)
        if self._thinking is None:
            return self._answer(text, [TextSpan(self._length - len(text), self._length)])
        reasoning, content = self._thinking.feed(text)
        pieces = self._reasoned(reasoning, done=bool(content))
        return [*pieces, *self._answer(content, self._thinking.spans())]

    def finish(self) -> list[Piece]:
        """End the output; return what was held back."""
        pieces: list[Piece] = []
        if self._thinking is not None:
            reasoning, content = self._thinking.finish()
            pieces += self._reasoned(reasoning, done=True)
            pieces += self._answer(content, self._thinking.spans())
        if self._calls is not None:
            pieces += self._kept(self._calls.finish())
            self._place()
        return pieces

    def spans(self) -> list[TextSpan]:
        """Positions in the output of the thinking and text read since the last call."""
        return self._spans.take()

    def _reasoned(self, text: str, *, done: bool) -> list[Piece]:
        if not self._stream_reasoning:
            self._held += text
            text = ""
            if done:
                text, self._held = self._held, ""
        return [ReasoningDelta(text)] if text else []

    def _answer(self, text: str, spans: list[TextSpan]) -> list[Piece]:
        """Parse text outside of thinking; `spans` without `thinking` locate it."""
        answered: list[TextSpan] = []
        for span in spans:
            if self._calls is not None and not span.thinking:
                answered.append(span)
            else:
                self._spans.add(span.start, span.stop - span.start, thinking=span.thinking)
        if not text:
            return []
        if self._calls is None:
            return [TextDelta(text)]
        self._answered.extend(text, answered)
        pieces = self._kept(self._calls.feed(text))
        self._place()
        return pieces

    def _place(self) -> None:
        """Record the position of the text outside of calls."""
        assert self._calls is not None, "the rules have a format of tool calls"
        for span in self._calls.spans():
            for part in self._answered.find(span):
                self._spans.add(part.start, part.stop - part.start)

    def _kept(self, events: Sequence[TextDelta | CallStart | ArgumentsDelta]) -> list[Piece]:
        kept: list[Piece] = []
        for event in events:
            if isinstance(event, TextDelta):
                kept.append(event)
            elif self._parallel or event.index == 0:
                self.has_calls = True
                kept.append(event)
        return kept


@dataclass(slots=True)
class CallText:
    """A whole call."""

    name: str
    arguments: str = ""


class ParsedOutput:
    """A whole output: thinking, text and calls.

    Attributes:
        reasoning: All thinking.
        text: All text.
        calls: All calls.
        parts: Thinking, text and calls in order of arrival.
        spans: Positions of thinking and text in the output.
    """

    def __init__(self) -> None:
        self.reasoning = ""
        self.text = ""
        self.calls: list[CallText] = []
        self.parts: list[ReasoningDelta | TextDelta | CallText] = []
        self.spans: list[TextSpan] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add pieces."""
        for piece in pieces:
            if isinstance(piece, ReasoningDelta):
                self.reasoning += piece.text
                self._extend(piece)
            elif isinstance(piece, TextDelta):
                self.text += piece.text
                self._extend(piece)
            elif isinstance(piece, CallStart):
                self.calls.append(CallText(piece.name))
                self.parts.append(self.calls[-1])
            else:
                self.calls[piece.index].arguments += piece.fragment

    def _extend(self, piece: ReasoningDelta | TextDelta) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, type(piece)):
            self.parts[-1] = type(piece)(last.text + piece.text)
        else:
            self.parts.append(piece)


def read_whole(rules: OutputRules, text: str) -> ParsedOutput:
    """Parse a whole output, with the same code as a stream; plain text needs no parsing."""
    if rules.plain and text:
        answer = ParsedOutput()
        answer.add([TextDelta(text)])
        answer.spans = [TextSpan(0, len(text))]
        return answer
    reader, answer = OutputReader(rules), ParsedOutput()
    answer.add(reader.feed(text))
    answer.add(reader.finish())
    answer.spans = reader.spans()
    return answer
