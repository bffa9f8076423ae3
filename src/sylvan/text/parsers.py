"""Selects the parsers for a model's output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sylvan.text import reasoning, tools
from sylvan.text.reasoning import ReasoningFamily
from sylvan.text.reasoning.tokens import ReasoningMarks, encoded
from sylvan.text.tokenizer import Tokenizer
from sylvan.text.tools import ToolFamily


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsers:
    """Formats of reasoning and tool calls; None if the model has none.

    Attributes:
        reasoning: Format of thinking.
        tools: Format of tool calls.
        special_thinking: Whether a thinking marker is a special token, which the text must show.
        special_tools: Whether a marker of calls is a special token.
        marks: Thinking markers as tokens; set if `reasoning` is.
        headers: Token ids of headers that may precede an answer.
        call_headers: Token ids of headers that may precede a call.
    """

    reasoning: ReasoningFamily | None
    tools: ToolFamily | None
    special_thinking: bool = False
    special_tools: bool = False
    marks: ReasoningMarks | None = None
    headers: tuple[tuple[int, ...], ...] = ()
    call_headers: tuple[tuple[int, ...], ...] = ()

    @property
    def think_starts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the markers that start thinking."""
        return self.marks.starts if self.marks else ()

    @property
    def think_ends(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the markers that end thinking; see `ReasoningMarks`."""
        return self.marks.ends if self.marks else ()

    @property
    def reasoning_name(self) -> str | None:
        """Name of the reasoning parser."""
        return self.reasoning.name if self.reasoning else None

    @property
    def tool_name(self) -> str | None:
        """Name of the tool-call parser."""
        return self.tools.name if self.tools else None


def make_parsers(
    tokenizer: Tokenizer,
    *,
    reasoning_parser: str | None,
    tool_parser: str | None,
    architecture: str = "",
) -> Parsers:
    """Return the parsers of these names; `auto` selects by the model's chat template.

    Args:
        tokenizer: The model's tokenizer.
        reasoning_parser: Name of a reasoning format; None leaves thinking in the text.
        tool_parser: Name of a tool-call format; None leaves calls in the text.
        architecture: The model's architecture; "" if unknown.

    Raises:
        ConfigError: there is no parser of that name.
    """
    template = "\n".join(tokenizer.chat_templates.values())
    thinking = calling = None
    if reasoning_parser is not None:
        thinking = reasoning.family(reasoning_parser, chat_template=template)
    if tool_parser is not None:
        calling = tools.family(tool_parser, chat_template=template, architecture=architecture)
    starts = thinking.starts if thinking else ()
    ends = (*thinking.ends, *thinking.interrupts) if thinking else ()
    return Parsers(
        reasoning=thinking,
        tools=calling,
        special_thinking=_any_special(tokenizer, (*starts, *ends)),
        special_tools=calling is not None and _any_special(tokenizer, calling.grammar.markers),
        marks=ReasoningMarks.of(thinking, tokenizer) if thinking else None,
        headers=encoded(tokenizer, thinking.headers if thinking else ()),
        call_headers=encoded(tokenizer, thinking.call_headers if thinking else ()),
    )


def _any_special(tokenizer: Tokenizer, markers: Iterable[str]) -> bool:
    specials = [text for text, i in tokenizer.protected.items() if i in tokenizer.special_ids]
    return any(text in marker for marker in markers for text in specials)
