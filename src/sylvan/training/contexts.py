"""Makes a tree of contexts from what a model said.

Shapes: T tokens of all texts, A tokens that the model said, C contexts of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.speculation.contexts import SHARES, TreeArrays

SURER = 0.1
"""A longer context is kept for the same guess if it is right so much more often."""


@dataclass(slots=True)
class _Level:
    """All contexts of one length: the parent, the older token, what mostly followed, how often."""

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    guesses: NDArray[np.int64]
    shares: NDArray[np.float64]


def context_tree(
    texts: Sequence[tuple[IntArray, int]], vocab_size: int, longest: int, least: int
) -> TreeArrays:
    """The most frequent next token of each context in some texts.

    Args:
        texts: Token ids, and how many of them were not said by the model.
        vocab_size: Ids are below it.
        longest: Tokens of a context.
        least: Contexts that came less often are left out.

    Raises:
        ValueError: the model said nothing.
    """
    ids, places, room = _said(texts)
    if not len(places):
        raise ValueError("the texts have no answers")
    said = ids[places]
    node = np.zeros(len(places), np.int64)
    levels = [_level(np.zeros(1, np.int64), np.zeros(1, np.int64), node, said)]
    for length in range(1, longest + 1):
        open_ = ~_single(node, said, len(levels[-1].guesses)) & (room >= length)
        places, said, room, node = (x[open_] for x in (places, said, room, node))
        keys, node = np.unique(node * vocab_size + ids[places - length], return_inverse=True)
        kept = np.bincount(node, minlength=len(keys)) >= least
        new_ids = np.cumsum(kept) - 1
        chosen = kept[node]
        places, said, room, node = (x[chosen] for x in (places, said, room, new_ids[node]))
        if not len(places):
            break
        keys = keys[kept]
        levels.append(_level(keys // vocab_size, keys % vocab_size, node, said))
    return _pruned(levels, vocab_size)


def _said(
    texts: Sequence[tuple[IntArray, int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All tokens; the places of those that were said; how many tokens of its text precede each."""
    lengths = np.array([len(text) for text, _ in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    empty = np.empty(0, np.int64)
    places = [np.arange(first, len(text)) for text, first in texts]
    found = [place + start for place, start in zip(places, starts.tolist(), strict=True)]
    ids = np.concatenate([empty, *(text for text, _ in texts)]).astype(np.int64)
    return ids, np.concatenate([empty, *found]), np.concatenate([empty, *places])


def _single(node: NDArray[np.int64], said: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """By place: whether one token only ever followed its context; older tokens add nothing."""
    low = np.full(count, np.iinfo(np.int64).max)
    high = np.full(count, -1)
    np.minimum.at(low, node, said)
    np.maximum.at(high, node, said)
    return (low == high)[node]


def _level(
    parents: NDArray[np.int64],
    tokens: NDArray[np.int64],
    node: NDArray[np.int64],
    said: NDArray[np.int64],
) -> _Level:
    pairs, counts = np.unique(np.stack([node, said]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], counts, pairs[0]))  # the last of each node came most
    nodes, following, counts = pairs[0][order], pairs[1][order], counts[order]
    last = np.append(np.flatnonzero(np.diff(nodes)), len(nodes) - 1)
    totals = np.bincount(node, minlength=len(last))
    return _Level(parents, tokens, following[last], counts[last] / (totals + 1.0))


def _pruned(levels: Sequence[_Level], vocab_size: int) -> TreeArrays:
    """Without contexts that guess as their parent does, unless longer ones need them."""
    kept = [np.zeros(len(level.guesses), bool) for level in levels]
    kept[0][0] = True
    for depth in range(len(levels) - 1, 0, -1):
        level, above = levels[depth], levels[depth - 1]
        other = level.guesses != above.guesses[level.parents]
        kept[depth] |= other | (level.shares > above.shares[level.parents] + SURER)
        kept[depth - 1][level.parents[kept[depth]]] = True
    first = 0
    numbers: list[NDArray[np.int64]] = []
    for mine in kept:
        numbers.append(np.cumsum(mine) - 1 + first)
        first += int(mine.sum())
    pairs = list(zip(levels, kept, strict=True))
    parents = [numbers[depth][level.parents[mine]] for depth, (level, mine) in enumerate(pairs[1:])]
    empty = np.empty(0, np.int64)
    shares = np.concatenate([level.shares[mine] for level, mine in pairs])
    return TreeArrays(
        np.concatenate([empty, *parents]).astype(np.int32),
        np.concatenate([empty, *(level.tokens[mine] for level, mine in pairs[1:])]).astype(
            np.int32
        ),
        np.concatenate([level.guesses[mine] for level, mine in pairs]).astype(np.int32),
        np.round(shares * SHARES).astype(np.uint8),
        vocab_size,
    )
