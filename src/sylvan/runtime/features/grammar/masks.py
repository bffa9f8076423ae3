"""A bitmask for a batch: the allowed next IDs of each constrained output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.output import ANY_BUT_END, BY_GRAMMAR, EXTRA_ONLY, Output

_MAX_KNOWN = 1024  # kinds of end tokens: requests set them
_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class MaskRows:
    """Rows of bits, reused in every step.

    Args:
        vocab_size: Number of IDs in the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._bits: IntArray = np.zeros((0, self._words), np.int32)
        self._places: dict[tuple[int, ...], list[tuple[int, np.int32]]] = {}  # see `_places_of`

    def first(self, count: int) -> IntArray:
        """Return the first rows, (count, words); they stay valid until more are requested."""
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._words), np.int32)
        return self._bits[:count]

    def fill(
        self, outputs: Sequence[Output], choices: Sequence[int], eos_ids: tuple[int, ...]
    ) -> None:
        """Fill row i for `outputs[i]`.

        An output that allows no ID gets an error.

        Args:
            outputs: At most as many as were requested from `first`.
            choices: `Output.choice` of each; none is UNCONSTRAINED.
            eos_ids: IDs whose bits libraries leave undefined.
        """
        bits = self._bits[: len(outputs)]
        free = [row for row, choice in enumerate(choices) if choice == BY_GRAMMAR]
        if free:
            matchers = [m for row in free if (m := outputs[row].matcher) is not None]
            self._ask(matchers, free)
            self._finish(bits, outputs, free, eos_ids)
        if len(free) < len(choices):
            forced = [(row, choice) for row, choice in enumerate(choices) if choice != BY_GRAMMAR]
            rows, ids = np.array(forced, np.int64).T
            bits[rows] = 0
            _set(bits, rows[ids >= 0], ids[ids >= 0])
        self._add_others(bits, outputs, choices)

    def _ask(self, matchers: list[GrammarMatcher], rows: list[int]) -> None:
        """Call the matchers of each library once."""
        kinds = set(map(type, matchers))
        if len(kinds) == 1:
            kinds.pop().fill_masks(matchers, self._bits, rows)
            return
        for kind in kinds:
            some = [i for i, matcher in enumerate(matchers) if type(matcher) is kind]
            kind.fill_masks([matchers[i] for i in some], self._bits, [rows[i] for i in some])

    def _finish(
        self,
        bits: IntArray,
        outputs: Sequence[Output],
        free: list[int],
        eos_ids: tuple[int, ...],
    ) -> None:
        """Set the bits of end tokens. Rows that are not in `free` are written afterwards."""
        for word, bit in self._places_of(eos_ids):
            bits[:, word] &= ~bit
        for row in free:
            output = outputs[row]
            assert output.matcher is not None
            if output.end_ids and output.matcher.is_accepting():
                for word, bit in self._places_of(output.end_ids):
                    bits[row, word] |= bit
            if output.banned_at == output.position:
                for word, bit in self._places_of(output.banned):
                    bits[row, word] &= ~bit
        dead = np.flatnonzero(~bits.any(axis=1)).tolist()
        for row in set(dead).intersection(free) if dead else ():
            matcher = outputs[row].matcher
            reason = matcher.error() if matcher is not None else ""
            outputs[row].error = reason or "the grammar allows no token of the vocabulary here"

    def _add_others(
        self, bits: IntArray, outputs: Sequence[Output], choices: Sequence[int]
    ) -> None:
        """Add IDs that do not depend on a grammar."""
        for row, choice in enumerate(choices):
            if choice in (BY_GRAMMAR, EXTRA_ONLY):
                for word, bit in self._places_of(outputs[row].extra_ids):
                    bits[row, word] |= bit
            elif choice == ANY_BUT_END:
                bits[row] = -1
                for word, bit in self._places_of(outputs[row].end_ids):
                    bits[row, word] &= ~bit

    def _places_of(self, ids: tuple[int, ...]) -> list[tuple[int, np.int32]]:
        """Return word and bit of IDs."""
        found = self._places.get(ids)
        if found is None:
            if len(self._places) >= _MAX_KNOWN:
                self._places.clear()
            found = [(i >> 5, _BITS[i & 31]) for i in ids if i >> 5 < self._words]
            self._places[ids] = found
        return found


def _set(bits: IntArray, rows: IntArray, ids: IntArray) -> None:
    inside = ids >> 5 < bits.shape[1]
    rows, ids = rows[inside], ids[inside]
    bits[rows, ids >> 5] = _BITS[ids & 31]
