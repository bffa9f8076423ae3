"""A copy of a tokenizer that never mistakes user text for control tokens.

In the copy, control tokens have random secret names, so text that spells `<|im_end|>` is ordinary
text, while the rest of the tokenizer (normaliser, word splitting, rules at control tokens) is
unchanged. In text with real control tokens, their names are replaced by the secret ones before
encoding.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from sylvan.protocol.errors import ConfigError
from sylvan.text.encoding import token_ids

_LETTERS = "bcdfghjklmnpqrstvwxz"


class SafeEncoder:
    """Encodes text with trusted parts (control tokens are recognised) and literal parts.

    Args:
        tokenizer: The ordinary tokenizer; it is not changed.
        protected: Text of each control token, with its id.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, protected: dict[str, int]) -> None:
        nonce = "".join(secrets.choice(_LETTERS) for _ in range(24))
        self._aliases = {text: _alias(nonce, token) for text, token in protected.items()}
        self._pattern = alternation(protected)
        self._copy = _renamed(tokenizer, self._aliases)
        for text, token in protected.items():
            if self._copy.token_to_id(self._aliases[text]) != token:
                raise ConfigError(f"The tokenizer cannot isolate its control token {text!r}.")

    def encode(
        self, segments: Sequence[tuple[str, bool]], *, add_special_tokens: bool
    ) -> list[int]:
        """Encode the joined segments; control tokens count only where the flag is True."""
        text = "".join(self._rename(part) if trusted else part for part, trusted in segments)
        return token_ids(self._copy, text, add_special_tokens=add_special_tokens)

    def _rename(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._aliases[match[0]], text)


def alternation(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern that finds any of the texts, the longest first; nothing matches if there is none."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _alias(nonce: str, token: int) -> str:
    # letters only: survives lower-casing, accent stripping and NFKC in normalisers
    digits = "".join(_LETTERS[int(digit)] for digit in str(token))
    return f"y{nonce}y{digits}y"


def _renamed(tokenizer: tokenizers.Tokenizer, aliases: dict[str, str]) -> tokenizers.Tokenizer:
    data = json.loads(tokenizer.to_str())
    for added in data.get("added_tokens", ()):
        added["content"] = aliases.get(added["content"], added["content"])
    _rename_model(data["model"], aliases)
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def _rename_model(model: dict[str, Any], aliases: dict[str, str]) -> None:
    """Rename vocabulary entries too: Unigram and word models would match them in plain text."""
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        renamed = {text for text in aliases if text in vocab}
        model["vocab"] = {aliases.get(text, text): token for text, token in vocab.items()}
    else:
        renamed = {piece for piece, _ in vocab if piece in aliases}
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if renamed and model.get("merges"):
        model["merges"] = [rule for rule in model["merges"] if not _touches(rule, renamed)]


def _touches(rule: str | list[str], texts: set[str]) -> bool:
    left, right = rule.split(" ", 1) if isinstance(rule, str) else rule
    return left in texts or right in texts or left + right in texts
