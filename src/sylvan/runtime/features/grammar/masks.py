"""One bitmask for a batch: which ids may come next in each output that is constrained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.output import SOME, Output

_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class MaskRows:
    """Rows of bits, reused from step to step.

    Args:
        vocab_size: How many ids there are logits for.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._bits: IntArray = np.zeros((0, self._words), np.int32)

    def first(self, count: int) -> IntArray:
        """The first rows, (count, words); they stay in place until more are asked for."""
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._words), np.int32)
        return self._bits[:count]

    def fill(self, outputs: Sequence[Output], eos_ids: Sequence[int]) -> None:
        """Row i for `outputs[i]`, none of which may go on with any id.

        An output that allows no id gets an error.

        Args:
            outputs: At most as many as `first` was asked for.
            eos_ids: Ids whose bits libraries set as they like.
        """
        forced: list[tuple[int, int]] = []
        free: list[tuple[int, GrammarMatcher]] = []
        for row, output in enumerate(outputs):
            token = output.choice
            if token != SOME:
                forced.append((row, token))
                continue
            assert output.matcher is not None
            free.append((row, output.matcher))
        bits = self._bits[: len(outputs)]
        if free:
            self._ask(free)
            self._finish(bits, outputs, [row for row, _ in free], eos_ids)
        if forced:
            rows, ids = np.array(forced, np.int64).T
            bits[rows] = 0
            _set(bits, rows, ids)

    def _ask(self, free: list[tuple[int, GrammarMatcher]]) -> None:
        """One call for the matchers of each library."""
        groups: dict[type[GrammarMatcher], list[tuple[int, GrammarMatcher]]] = {}
        for row, matcher in free:
            groups.setdefault(type(matcher), []).append((row, matcher))
        for kind, group in groups.items():
            kind.fill_masks([m for _, m in group], self._bits, [row for row, _ in group])

    def _finish(
        self, bits: IntArray, outputs: Sequence[Output], free: list[int], eos_ids: Sequence[int]
    ) -> None:
        """Say where an output may end. Rows that are not in `free` are written afterwards."""
        for token in eos_ids:
            if token >> 5 < self._words:
                bits[:, token >> 5] &= ~_BITS[token & 31]
        for row in free:
            ends = outputs[row].ends
            if ends and outputs[row].may_end:
                for token in ends:
                    if token >> 5 < self._words:
                        bits[row, token >> 5] |= _BITS[token & 31]
        dead = set(np.flatnonzero(~bits.any(axis=1)).tolist())
        for row in free:
            if row in dead:
                output = outputs[row]
                reason = output.matcher.error() if output.matcher is not None else ""
                output.error = reason or "the grammar allows no token of the vocabulary here"


def _set(bits: IntArray, rows: IntArray, ids: IntArray) -> None:
    inside = ids >> 5 < bits.shape[1]
    rows, ids = rows[inside], ids[inside]
    bits[rows, ids >> 5] = _BITS[ids & 31]
