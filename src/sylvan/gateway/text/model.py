"""What is needed to turn requests for one model into token ids, and ids into answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.config.route import TokensConfig
from sylvan.text import reasoning, tools
from sylvan.text.chat_template import ChatTemplate, resolve_template
from sylvan.text.reasoning import ReasoningFamily
from sylvan.text.tokenizer import Tokenizer
from sylvan.text.tools import ToolFamily
from sylvan.utils.threads import call_in_thread

INLINE_CHARS = 2048
"""Longer texts are tokenised in a thread."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model.

    Attributes:
        tokenizer: Of the model.
        template: Its chat template.
        reasoning: Format of its thinking; None: it does not think.
        tools: Format of its calls; None: it makes none.
        shows_markers: Markers of thinking or calls are special tokens, which the text must show.
        ids: Token ids of texts that came lately.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    reasoning: ReasoningFamily | None
    tools: ToolFamily | None
    shows_markers: bool
    ids: TextIds

    @classmethod
    def load(cls, folder: Path, config: TokensConfig) -> ModelText:
        """Load from a directory with the tokenizer's files. Takes seconds.

        Raises:
            ConfigError: The files or a setting cannot be used.
        """
        chosen = resolve_template(config.chat_template) if config.chat_template else None
        tokenizer = Tokenizer.load(folder, chat_template=chosen)
        source = "\n".join(tokenizer.chat_templates.values())
        thinking = calling = None
        if config.reasoning_parser != "none":
            thinking = reasoning.family(config.reasoning_parser, chat_template=source)
        if config.tool_parser != "none":
            calling = tools.family(config.tool_parser, chat_template=source)
        markers = [*(thinking.starts if thinking else ()), *(thinking.ends if thinking else ())]
        markers += calling.grammar.markers if calling else ()
        special = [text for text, i in tokenizer.protected.items() if i in tokenizer.special_ids]
        shows = any(text in marker for marker in markers for text in special)
        ids = TextIds(tokenizer, config.cache_entries)
        return cls(tokenizer, ChatTemplate(tokenizer), thinking, calling, shows, ids)


class TextIds:
    """Token ids of texts; those that came lately are remembered.

    Args:
        tokenizer: Makes them.
        max_entries: Texts that are remembered.

    Attributes:
        hits: Texts that were remembered.
    """

    def __init__(self, tokenizer: Tokenizer, max_entries: int) -> None:
        self._tokenizer = tokenizer
        self._max_entries = max_entries
        self._known: OrderedDict[str, Sequence[int]] = OrderedDict()
        self.hits = 0

    async def of(self, text: str) -> Sequence[int]:
        """The ids of a text of a client, in which control tokens count."""
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            self.hits += 1
            return known
        if len(text) <= INLINE_CHARS:
            ids: Sequence[int] = self._tokenizer.encode(text)
        else:
            ids = await call_in_thread(self._tokenizer.encode, text)
        if self._max_entries:
            self._known[text] = ids
            while len(self._known) > self._max_entries:
                self._known.popitem(last=False)
        return ids
