"""A tokenizer's vocabulary for grammar libraries: the bytes of each ID, and the non-text IDs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import IntArray

Encode = Callable[[bytes], list[int]]
"""Encodes bytes as IDs whose bytes concatenate to them; no special IDs."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The IDs that can be sampled.

    Attributes:
        tokens: Bytes of each ID; empty for IDs without text, such as padding of the model's head.
        special: Control token IDs, by the name that grammars use.
        eos_ids: IDs that end an output; at least one.
        encode: The model tokenizer's encoder.
    """

    tokens: Sequence[bytes]
    special: dict[str, int]
    eos_ids: tuple[int, ...]
    encode: Encode

    @property
    def size(self) -> int:
        """The largest ID plus one."""
        return len(self.tokens)

    @property
    def words(self) -> int:
        """Length of a mask row in 32-bit words."""
        return -(-self.size // 32)

    def non_text_ids(self) -> IntArray:
        """IDs that are never part of text: special and empty ones, ascending."""
        empty = [i for i, token in enumerate(self.tokens) if not token]
        return np.array(sorted({*empty, *self.special.values()}), np.int32)


def single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """The ID of each single byte; empty unless every byte has one.

    With all of them, any text can be written byte by byte, so the set of possible next bytes
    is the set of first bytes of the allowed tokens.
    """
    unusable = {*vocabulary.non_text_ids().tolist(), *vocabulary.eos_ids}
    found = {
        token[0]: i
        for i, token in enumerate(vocabulary.tokens)
        if len(token) == 1 and i not in unusable
    }
    return found if len(found) == 256 else {}


class GreedyEncoder:
    """Encodes with the longest token each time, ignoring merges. Drops bytes without a token."""

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
