"""Text that is certain to come, as tokens.

A forced text could be split into tokens in many ways, and what the model would write is one of
them: the tokenizer's own. Near the end of the forced text that is not settled yet, since a token
may reach into what follows, so those tokens are left to the model.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.vocabulary import Vocabulary


class Jumper:
    """Appends tokens that need no model to a matcher."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._sorted = sorted({token for token in vocabulary.tokens if token})
        self._longest = max(map(len, self._sorted), default=0)

    def advance(self, matcher: GrammarMatcher) -> tuple[int, ...]:
        """Let `matcher` accept the tokens that are certain; returns them."""
        data = matcher.forced()
        if not data:
            return ()
        ids = self._vocabulary.encode(data)
        if b"".join(self._vocabulary.tokens[i] for i in ids) != data:
            return ()
        taken = _accept(matcher, ids)
        if len(taken) == len(ids) and matcher.is_terminated():
            return tuple(taken)
        settled = self._settled(ids[: len(taken)], data)
        matcher.rollback(len(taken) - settled)
        return tuple(taken[:settled])

    def _settled(self, ids: Sequence[int], data: bytes) -> int:
        """How many of `ids` stay as they are whatever follows `data`."""
        border = len(data)
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            if self._goes_on(data[start:]):
                border = start
                break
        end = count = 0
        for count, token in enumerate(ids):
            end += len(self._vocabulary.tokens[token])
            if end > border:
                return count
        return count + 1 if ids else 0

    def _goes_on(self, text: bytes) -> bool:
        """Whether some token begins with `text` and is longer."""
        at = bisect.bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


def _accept(matcher: GrammarMatcher, ids: Sequence[int]) -> list[int]:
    taken: list[int] = []
    for token in ids:
        if not matcher.accept(token):
            break
        taken.append(token)
    return taken
