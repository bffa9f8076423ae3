"""Generates prompts of a given number of tokens, and counts the tokens of others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sylvan.text.tokenizer import Tokenizer

MAX_TRIES = 10


class RandomPrompts:
    """Draws texts from the ordinary tokens of a vocabulary.

    Args:
        tokenizer: Tokenizer of the model under test.
        rng: Random source.
        suffix: Text at the end of each prompt.
    """

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, suffix: str = "") -> None:
        self.rng = rng
        self.suffix = suffix
        self._tokenizer = tokenizer
        control = {*tokenizer.special_ids, *tokenizer.protected.values()}
        self._ordinary = [
            token
            for token in range(tokenizer.vocab_size)
            if token not in control and _is_text(tokenizer.token_bytes(token))
        ]

    def encode(self, text: str) -> list[int]:
        """Tokenise, without the tokens that start or end a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def draw(self, num_tokens: int) -> tuple[str, list[int]]:
        """Return a text and its IDs: `num_tokens` of them, unless no such text is found.

        Random tokens do not survive decoding and encoding, since neighbours merge; so the text is
        encoded again, and truncated or extended, until its length is right.
        """
        ids = self._some(num_tokens)
        best: list[int] = []
        for _ in range(MAX_TRIES):
            ids = self.encode(self._tokenizer.decode(ids))
            if abs(len(ids) - num_tokens) < abs(len(best) - num_tokens) or not best:
                best = ids
            if len(ids) == num_tokens:
                break
            ids = ids[:num_tokens] + self._some(num_tokens - len(ids))
        return self._tokenizer.decode(best), best

    def length(self, most: int, ratio: float) -> int:
        """Draw a length between `ratio * most` (at least 1) and `most`."""
        return self.rng.randint(max(1, int(ratio * most)), most)

    def with_suffix(self, text: str, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Append the suffix to a prompt; return text and IDs."""
        if not self.suffix:
            return text, list(ids)
        return text + self.suffix, [*ids, *self.encode(self.suffix)]

    def _some(self, count: int) -> list[int]:
        return self.rng.choices(self._ordinary, k=count) if count > 0 else []


def _is_text(data: bytes) -> bool:
    """Whether bytes are printable characters on their own."""
    try:
        return data.decode().isprintable() and bool(data)
    except UnicodeDecodeError:
        return False
