"""Turns requests for one model into token IDs, and token IDs into answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.config.route import TokensConfig
from sylvan.text.chat_template import ChatTemplate, resolve_template
from sylvan.text.parsers import Parsers, make_parsers
from sylvan.text.segments import SegmentedEncoder
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.threads import call_in_thread

INLINE_CHARS = 2048
"""Longer texts are tokenised in a thread."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text processing of one model.

    Attributes:
        tokenizer: Its tokenizer.
        template: Its chat template.
        parsers: Its reasoning and tool-call parsers.
        ids: Cached token IDs of recent texts.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    parsers: Parsers
    ids: TextIds

    @classmethod
    def load(cls, folder: Path, config: TokensConfig) -> ModelText:
        """Load a model's files from a directory. Takes seconds.

        Raises:
            ConfigError: The files or a setting are unusable.
        """
        chosen = resolve_template(config.chat_template) if config.chat_template else None
        tokenizer = Tokenizer.load(folder, chat_template=chosen)
        parsers = make_parsers(
            tokenizer,
            reasoning_parser=_unless_none(config.reasoning_parser),
            tool_parser=_unless_none(config.tool_parser),
        )
        segments = SegmentedEncoder(tokenizer, config.cache_bytes)
        template = ChatTemplate(tokenizer, encode=segments.encode)
        return cls(tokenizer, template, parsers, TextIds(segments, config.cache_entries))


def _unless_none(name: str) -> str | None:
    return None if name == "none" else name


class TextIds:
    """Tokenises texts, with a cache of recent ones.

    Args:
        segments: Tokenises a text.
        max_entries: Size of the cache.

    Attributes:
        hits: Number of cache hits.
    """

    def __init__(self, segments: SegmentedEncoder, max_entries: int) -> None:
        self._segments = segments
        self._max_entries = max_entries
        self._known: OrderedDict[str, Sequence[int]] = OrderedDict()
        self.hits = 0

    async def of(self, text: str) -> Sequence[int]:
        """Return the IDs of a client's text, in which control tokens are recognised."""
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            self.hits += 1
            return known
        if len(text) <= INLINE_CHARS:
            ids: Sequence[int] = self._segments.encode(text)
        else:
            ids = await call_in_thread(self._segments.encode, text)
        if self._max_entries:
            self._known[text] = ids
            while len(self._known) > self._max_entries:
                self._known.popitem(last=False)
        return ids
