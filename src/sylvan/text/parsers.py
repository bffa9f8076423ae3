"""Which parsers read the model's output."""

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
    """Formats of reasoning and tool calls; None where the model has none.

    Attributes:
        reasoning: Where thinking begins and ends.
        tools: How calls are written.
        special_thinking: A marker of thinking is a special token, which the text must show.
        special_tools: The same for calls.
        marks: Where thinking begins and ends, as tokens; there if `reasoning` is.
        headers: Ids of what may stand before an answer.
        call_headers: Ids of what may stand before a call.
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
        """Ids of the markers that begin thinking."""
        return self.marks.starts if self.marks else ()

    @property
    def think_ends(self) -> tuple[tuple[int, ...], ...]:
        """Ids of the markers that end it; see `ReasoningMarks`."""
        return self.marks.ends if self.marks else ()

    @property
    def reasoning_name(self) -> str | None:
        """Name of the reasoning parser."""
        return self.reasoning.name if self.reasoning else None

    @property
    def tool_name(self) -> str | None:
        """Name of the parser of tool calls."""
        return self.tools.name if self.tools else None


def make_parsers(
    tokenizer: Tokenizer,
    *,
    reasoning_parser: str | None,
    tool_parser: str | None,
    architecture: str = "",
) -> Parsers:
    """The parsers of these names; `auto`: those that the model's template calls for.

    Args:
        tokenizer: Of the model.
        reasoning_parser: Name of the format of thinking; None: it is left in the text.
        tool_parser: Name of the format of calls; None: they are left in the text.
        architecture: Of the model; "": not known.

    Raises:
        ConfigError: There is no parser of that name.
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
