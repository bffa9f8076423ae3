"""Tokens that write the same JSON differently."""

from __future__ import annotations

from sylvan.runtime.features.grammar.vocabulary import Vocabulary

_SPACE = b" \t\r\n"
_CLOSING = b",]}"


class TokenKinds:
    """Classifies tokens that start alike, between JSON tokens.

    Attributes:
        blank: IDs consisting of white space only.

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

    def equivalent_closers(self, token: int) -> frozenset[int]:
        """Return the IDs that close a value with the same mark as `token`; else only `token`."""
        text = self.vocabulary.tokens[token].lstrip(_SPACE)
        return self._closing.get(text[0], frozenset({token})) if text else frozenset({token})

    def blanks_before(self, token: int) -> int:
        """Return the bytes of white space at the start of a token."""
        text = self.vocabulary.tokens[token]
        return len(text) - len(text.lstrip(_SPACE))
