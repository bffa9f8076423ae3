"""Moves whole pages between arrays and the host, by functions compiled before the first step.

Each call moves a fixed number of pages, so the number of pages never triggers a compilation.

Shapes: N pages to move, M pages of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sylvan.protocol.arrays import IntArray

PAGES_PER_CALL = 8
"""A constant of the compiled functions."""


class PageMoves:
    """Gathers pages of some arrays, and scatters pages into them.

    Args:
        arrays: Pages along the first axis; arrays of later calls must have the same shapes.
    """

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        given = [*arrays]
        numbers = np.zeros(PAGES_PER_CALL, np.int32)
        kept = [x.sharding for x in given]
        rows = [np.zeros((PAGES_PER_CALL, *x.shape[1:]), x.dtype) for x in given]
        self._gather: Any = jax.jit(_gathered).lower(given, numbers).compile()
        scatter = jax.jit(_scattered, donate_argnums=0, out_shardings=kept)
        self._scatter: Any = scatter.lower(given, numbers, rows).compile()

    def gathered(
        self, arrays: Sequence[jax.Array], places_N: IntArray
    ) -> list[tuple[int, list[jax.Array]]]:
        """Gather pages; return for each call the index of its first page and (M, ...) per array.

        The last call is padded with page 0.
        """
        return [
            (first, self._gather([*arrays], _padded(places_N[first : first + PAGES_PER_CALL])))
            for first in range(0, len(places_N), PAGES_PER_CALL)
        ]

    def scattered(
        self, arrays: Sequence[jax.Array], places_N: IntArray, pages: Sequence[np.ndarray]
    ) -> Sequence[jax.Array]:
        """Write `pages` (N, ...) of each array to their places; the old arrays become invalid.

        Padding overwrites page 0 with zeros; no request uses page 0.
        """
        found = [*arrays]
        for first in range(0, len(places_N), PAGES_PER_CALL):
            some = slice(first, first + PAGES_PER_CALL)
            rows = [_padded(part[some]) for part in pages]
            found = self._scatter(found, _padded(places_N[some]), rows)
        return found


def _padded(x: np.ndarray) -> np.ndarray:
    """Pad with zeros to the pages of a call."""
    found = np.zeros((PAGES_PER_CALL, *x.shape[1:]), x.dtype)
    found[: len(x)] = x
    return found


def _gathered(arrays: list[jax.Array], places_M: jax.Array) -> list[jax.Array]:
    return [x[places_M] for x in arrays]


def _scattered(
    arrays: list[jax.Array], places_M: jax.Array, rows: list[jax.Array]
) -> list[jax.Array]:
    return [x.at[places_M].set(part) for x, part in zip(arrays, rows, strict=True)]
