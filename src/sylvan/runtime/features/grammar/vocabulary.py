"""A tokenizer as grammar libraries need it: the bytes of each id, and which ids are no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import IntArray

Encode = Callable[[bytes], list[int]]
"""Bytes to ids whose bytes, joined, are these bytes; no special ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The ids that can be sampled.

    Attributes:
        tokens: Bytes of each id; empty for ids without any, such as padding of the model's head.
        special: Ids that stand for no text (control tokens), by the name that grammars may use.
        eos_ids: Ids that end an output; at least one.
        encode: How the model's tokenizer writes a text.
    """

    tokens: Sequence[bytes]
    special: dict[str, int]
    eos_ids: tuple[int, ...]
    encode: Encode

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return len(self.tokens)

    @property
    def words(self) -> int:
        """Length of a mask row in 32-bit words."""
        return -(-self.size // 32)

    def untextual(self) -> IntArray:
        """Ids that no text consists of: special ones and empty ones, ascending."""
        empty = [i for i, token in enumerate(self.tokens) if not token]
        return np.array(sorted({*empty, *self.special.values()}), np.int32)


def single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """The id of each single byte; empty unless every byte has one.

    With all of them, a text can be written byte by byte, so that what the next tokens may begin
    with is what the text may go on with.
    """
    unusable = {*vocabulary.untextual().tolist(), *vocabulary.eos_ids}
    found = {
        token[0]: i
        for i, token in enumerate(vocabulary.tokens)
        if len(token) == 1 and i not in unusable
    }
    return found if len(found) == 256 else {}


class GreedyEncoder:
    """The longest token each time; knows nothing of merges. Leaves out bytes that no token has."""

    def __init__(self, tokens: Sequence[bytes], special_ids: frozenset[int]) -> None:
        usable = (i for i in range(len(tokens) - 1, -1, -1) if i not in special_ids)
        self._ids = {tokens[i]: i for i in usable if tokens[i]}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                found = self._ids.get(data[at : at + length])
                if found is not None:
                    ids.append(found)
                    at += length
                    break
            else:
                at += 1
        return ids
