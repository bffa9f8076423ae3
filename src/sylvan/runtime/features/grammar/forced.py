"""Forced text as tokens.

A forced text can be split into tokens in many ways; the model would write the tokenizer's own
split. Near the end of the forced text that split is not determined, since a token may extend
into what follows, so those tokens are left to the model.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

_MAX_KNOWN = 4096
_LONGEST_KNOWN = 1024  # bytes


class Jumper:
    """Appends forced tokens to a matcher."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[bytes, tuple[tuple[int, ...], int]] = {}  # see `_written`
        self._sorted = sorted({token for token in vocabulary.tokens if token})
        self._longest = max(map(len, self._sorted), default=0)

    def advance(self, matcher: GrammarMatcher) -> tuple[int, ...]:
        """Make `matcher` accept the forced tokens; return them."""
        data = matcher.forced()
        if not data:
            return ()
        found = self._known.get(data)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._written(data)
            if len(data) <= _LONGEST_KNOWN:
                self._known[data] = found
        ids, certain = found
        taken = matcher.accept_all(ids)
        if taken == len(ids) and (certain == taken or matcher.is_terminated()):
            return ids
        certain = min(certain, taken)
        matcher.rollback(taken - certain)
        return ids[:certain]

    def _written(self, data: bytes) -> tuple[tuple[int, ...], int]:
        """Return the IDs of a text, and how many of them stay the same whatever follows."""
        ids = self._vocabulary.encode(data)
        if b"".join(self._vocabulary.tokens[i] for i in ids) != data:
            return (), 0
        return tuple(ids), self._unambiguous(ids, data)

    def _unambiguous(self, ids: Sequence[int], data: bytes) -> int:
        border = len(data)
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            if self._can_continue(data[start:]):
                border = start
                break
        end = count = 0
        for count, token in enumerate(ids):
            end += len(self._vocabulary.tokens[token])
            if end > border:
                return count
        return count + 1 if ids else 0

    def _can_continue(self, text: bytes) -> bool:
        """Whether a token starts with `text` and is longer."""
        at = bisect.bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)
