"""Builds a context tree (`features.speculation.contexts`) from the answers of a model.

A context is the last few tokens before an answer token. Arrays have one entry per answer token that
still has a context, unless their comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.speculation.contexts import SHARES, TreeArrays

MIN_SHARE_GAIN = 0.1
"""A longer context with the same prediction is kept only if its share is higher by this much."""


@dataclass(slots=True)
class _Level:
    """All contexts of one length.

    Attributes:
        parents: Number of the context without its oldest token, in the level above.
        tokens: The oldest token.
        predictions: The most frequent next token.
        shares: The share of that token among all next tokens.
    """

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    predictions: NDArray[np.int64]
    shares: NDArray[np.float64]


def context_tree(
    texts: Sequence[tuple[IntArray, int]], vocab_size: int, max_context: int, min_count: int
) -> TreeArrays:
    """Return a tree with the most frequent next token of each context in some texts.

    Args:
        texts: Token IDs of each text, and the length of its prompt.
        vocab_size: Size of the vocabulary.
        max_context: Maximum length of a context.
        min_count: Contexts that occur less often are left out.

    Raises:
        ValueError: The texts contain no answer tokens.
    """
    ids, positions, preceding = _answer_tokens(texts)
    if not len(positions):
        raise ValueError("the texts have no answers")
    following = ids[positions]
    node = np.zeros(len(positions), np.int64)
    levels = [_level(np.zeros(1, np.int64), np.zeros(1, np.int64), node, following)]
    for length in range(1, max_context + 1):
        is_known = _is_unambiguous(node, following, len(levels[-1].predictions))
        open_ = ~is_known & (preceding >= length)
        positions, following, preceding, node = (
            x[open_] for x in (positions, following, preceding, node)
        )
        keys, node = np.unique(node * vocab_size + ids[positions - length], return_inverse=True)
        kept = np.bincount(node, minlength=len(keys)) >= min_count
        new_ids = np.cumsum(kept) - 1
        chosen = kept[node]
        positions, following, preceding, node = (
            x[chosen] for x in (positions, following, preceding, new_ids[node])
        )
        if not len(positions):
            break
        keys = keys[kept]
        levels.append(_level(keys // vocab_size, keys % vocab_size, node, following))
    return _pruned(levels, vocab_size)


def _answer_tokens(
    texts: Sequence[tuple[IntArray, int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return all tokens, positions of answer tokens, and numbers of tokens before them in texts."""
    lengths = np.array([len(text) for text, _ in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    empty = np.empty(0, np.int64)
    positions = [np.arange(first, len(text)) for text, first in texts]
    found = [position + start for position, start in zip(positions, starts.tolist(), strict=True)]
    ids = np.concatenate([empty, *(text for text, _ in texts)]).astype(np.int64)
    return ids, np.concatenate([empty, *found]), np.concatenate([empty, *positions])


def _is_unambiguous(
    node: NDArray[np.int64], following: NDArray[np.int64], count: int
) -> NDArray[np.bool_]:
    """Whether a context has a single next token, so that longer contexts predict nothing else."""
    low = np.full(count, np.iinfo(np.int64).max)
    high = np.full(count, -1)
    np.minimum.at(low, node, following)
    np.maximum.at(high, node, following)
    return (low == high)[node]


def _level(
    parents: NDArray[np.int64],
    tokens: NDArray[np.int64],
    node: NDArray[np.int64],
    following: NDArray[np.int64],
) -> _Level:
    pairs, counts = np.unique(np.stack([node, following]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], counts, pairs[0]))  # the most frequent of each node comes last
    nodes, following, counts = pairs[0][order], pairs[1][order], counts[order]
    last = np.append(np.flatnonzero(np.diff(nodes)), len(nodes) - 1)
    totals = np.bincount(node, minlength=len(last))
    return _Level(parents, tokens, following[last], counts[last] / (totals + 1.0))


def _pruned(levels: Sequence[_Level], vocab_size: int) -> TreeArrays:
    """Drop contexts that predict no better than their parent, unless a longer one needs them."""
    kept = [np.zeros(len(level.predictions), bool) for level in levels]
    kept[0][0] = True
    for depth in range(len(levels) - 1, 0, -1):
        level, above = levels[depth], levels[depth - 1]
        other = level.predictions != above.predictions[level.parents]
        kept[depth] |= other | (level.shares > above.shares[level.parents] + MIN_SHARE_GAIN)
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
        np.concatenate([level.predictions[mine] for level, mine in pairs]).astype(np.int32),
        np.round(shares * SHARES).astype(np.uint8),
        vocab_size,
    )
