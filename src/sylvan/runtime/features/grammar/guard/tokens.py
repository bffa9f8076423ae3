"""Tokens that write the same JSON in another way."""

from __future__ import annotations

from sylvan.runtime.features.grammar.vocabulary import Vocabulary

_SPACE = b" \t\r\n"
_CLOSING = b",]}"


class TokenKinds:
    """Which tokens begin alike, between JSON tokens.

    Attributes:
        blank: Ids of nothing but white space.

    Args:
        vocabulary: The model's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        blank: list[int] = []
        closing: dict[int, list[int]] = {mark: [] for mark in _CLOSING}
        for token, text in enumerate(vocabulary.tokens):
            stripped = text.lstrip(_SPACE)
            if text and not stripped:
                blank.append(token)
            elif stripped and stripped[0] in closing:
                closing[stripped[0]].append(token)
        self.blank = frozenset(blank)
        self._closing = {mark: frozenset(ids) for mark, ids in closing.items()}

    def closing_like(self, token: int) -> frozenset[int]:
        """Ids that end a value with the same mark as `token`; itself if it begins otherwise."""
        text = self.vocabulary.tokens[token].lstrip(_SPACE)
        return self._closing.get(text[0], frozenset({token})) if text else frozenset({token})

    def blanks_before(self, token: int) -> int:
        """Bytes of white space with which a token begins."""
        text = self.vocabulary.tokens[token]
        return len(text) - len(text.lstrip(_SPACE))
