"""The vocabulary of a tokenizer, and how it encodes a forced text."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary
from sylvan.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Number of IDs in the model's logits.
    """
    size = max(vocab_size, tokenizer.vocab_size)
    names = {i: tokenizer.token_bytes(i).decode("utf-8", "replace") for i in tokenizer.special_ids}
    return Vocabulary(
        tokens=[tokenizer.token_bytes(i) for i in range(size)],
        special={name: i for i, name in sorted(names.items(), reverse=True)},
        eos_ids=tuple(i for i in tokenizer.eos_ids if 0 <= i < size),
        encode=TextEncoder(tokenizer),
    )


class TextEncoder:
    """Encodes a piece of text from inside an output, with the tokenizer if it is reliable there.

    Some tokenizers add a leading space, or parse control tokens; if the bytes of their result
    differ from the given bytes, encode greedily with the longest tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._greedy = GreedyEncoder(tokens, tokenizer.special_ids)
        self._anchor = tokenizer.encode("\n", add_special_tokens=False)

    def __call__(self, data: bytes) -> list[int]:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return self._greedy(data)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._decodes_to(ids, data):
            return ids
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        anchor = len(self._anchor)
        if ids[:anchor] == self._anchor and self._decodes_to(ids[anchor:], data):
            return ids[anchor:]
        return self._greedy(data)

    def _decodes_to(self, ids: Sequence[int], data: bytes) -> bool:
        tokenizer = self._tokenizer
        if not tokenizer.special_ids.isdisjoint(ids):
            return False
        return b"".join(map(tokenizer.token_bytes, ids)) == data
