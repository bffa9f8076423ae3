"""Covering arrays: few rows of a grid that contain every pair of values of two axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return the pairs of (axis, value) that a row contains."""
    return set(itertools.combinations(sorted(row.items()), 2))


def covering_rows(axes: Mapping[str, Sequence[Any]], seed: int) -> list[Row]:
    """Return rows that together contain each pair of values of different axes.

    `seed` breaks ties between rows that cover equally many new pairs, so that other seeds cover
    other triples.
    """
    grid = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    random.Random(seed).shuffle(grid)
    found = [(row, pairs_of(row)) for row in grid]
    left = set[Any]().union(*(pairs for _, pairs in found))
    rows: list[Row] = []
    while left:
        row, pairs = max(found, key=lambda entry: len(entry[1] & left))
        rows.append(row)
        left -= pairs
    return rows
