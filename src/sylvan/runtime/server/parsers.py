"""Which parsers read the model's output."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.server.settings import ServerSettings
from sylvan.text.reasoning import ReasoningFamily, family
from sylvan.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsers:
    """Formats of reasoning and tool calls; None where the model has none.

    Attributes:
        reasoning: Where thinking begins and ends.
        think_is_special: A marker of thinking is a special token, so that they must be shown.
    """

    reasoning: ReasoningFamily | None
    think_is_special: bool = False
    think_end_ids: tuple[int, ...] = ()
    tool_name: str | None = None

    @property
    def reasoning_name(self) -> str | None:
        """Name of the reasoning parser."""
        return self.reasoning.name if self.reasoning else None


def make_parsers(settings: ServerSettings, tokenizer: Tokenizer) -> Parsers:
    """The parsers that the settings name, or that the model's template calls for.

    Raises:
        ConfigError: There is no parser of that name.
    """
    template = tokenizer.chat_template or ""
    reasoning = None
    if settings.reasoning_parser is not None:
        reasoning = family(settings.reasoning_parser, chat_template=template)
    return Parsers(
        reasoning=reasoning,
        think_is_special=reasoning is not None
        and _any_special(tokenizer, (*reasoning.starts, *reasoning.ends)),
        think_end_ids=_end_ids(tokenizer, reasoning),
        tool_name=None,
    )


def _any_special(tokenizer: Tokenizer, markers: tuple[str, ...]) -> bool:
    specials = [text for text, i in tokenizer.protected.items() if i in tokenizer.special_ids]
    return any(text in marker for marker in markers for text in specials)


def _end_ids(tokenizer: Tokenizer, reasoning: ReasoningFamily | None) -> tuple[int, ...]:
    if reasoning is None:
        return ()
    return tuple(tokenizer.encode(reasoning.ends[0], add_special_tokens=False))
