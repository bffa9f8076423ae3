"""Finds the tokens of a sample that are part of its visible text."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sylvan.text.spans import TextSpan
from sylvan.text.tokenizer import Tokenizer

Entry = TypeVar("Entry")


@dataclass(slots=True)
class _Token(Generic[Entry]):
    """One token and the characters that it is part of."""

    entry: Entry
    start: int
    stop: int


class VisibleTokens(Generic[Entry]):
    """Passes on entries of tokens of visible text, and drops the others.

    Invisible are end tokens, stop strings, thinking markers, and calls. A token is visible if one
    of its characters is. The result does not depend on how the output was split.

    Args:
        tokenizer: Provides the bytes of tokens.
        skip_special_tokens: Whether the sample's text omits special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._may_lose_space = tokenizer.strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text of all tokens so far
        self._waiting: list[_Token[Entry]] = []

    def add(self, ids: Sequence[int], entries: Sequence[Entry], text: str) -> None:
        """Add tokens and the text that arrived with them, which may lag behind."""
        for token, entry in zip(ids, entries, strict=True):
            data = b"" if token in self._skipped else self._bytes_of(token)
            if self._may_lose_space and data and not self._waiting:
                self._may_lose_space = data.startswith(b" ")
            if not data:
                continue
            start = self._length
            self._length += len(self._decoder.decode(data))
            self._waiting.append(_Token(entry, start, max(self._length, start + 1)))
        if self._may_lose_space and text:
            self._may_lose_space = False
            if not text.startswith(" "):
                self._shift()

    def take(self, spans: Sequence[TextSpan]) -> list[Entry]:
        """Entries that became visible, given the positions of new visible text."""
        taken: list[Entry] = []
        for span in spans:
            first = bisect_right(self._waiting, span.start, key=lambda token: token.stop)
            last = bisect_left(self._waiting, span.stop, key=lambda token: token.start)
            taken += [token.entry for token in self._waiting[first:last]]
            del self._waiting[first:last]
        return taken

    def _shift(self) -> None:
        """Account for the dropped space of the first token."""
        self._length -= 1
        for token in self._waiting:
            token.start -= 1
            token.stop -= 1
