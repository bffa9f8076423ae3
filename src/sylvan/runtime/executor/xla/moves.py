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

MOST = 8
"""Pages of a call."""


class PageMoves:
    """Gathers pages of some arrays, and scatters pages into them.

    Args:
        arrays: Pages along their first axis; those of later calls have the same shapes.
    """

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        given = [*arrays]
        numbers = np.zeros(MOST, np.int32)
        kept = [x.sharding for x in given]
        rows = [np.zeros((MOST, *x.shape[1:]), x.dtype) for x in given]
        self._gather: Any = jax.jit(_gathered).lower(given, numbers).compile()
        scatter = jax.jit(_scattered, donate_argnums=0, out_shardings=kept)
        self._scatter: Any = scatter.lower(given, numbers, rows).compile()

    def gathered(
        self, arrays: Sequence[jax.Array], places_N: IntArray
    ) -> list[tuple[int, list[jax.Array]]]:
        """Pages by the call that took them: the first of the N pages, and (M, ...) of each array.

        Pages of the last call beyond the N are page 0.
        """
        return [
            (first, self._gather([*arrays], _padded(places_N[first : first + MOST])))
            for first in range(0, len(places_N), MOST)
        ]

    def scattered(
        self, arrays: Sequence[jax.Array], places_N: IntArray, pages: Sequence[np.ndarray]
    ) -> Sequence[jax.Array]:
        """The arrays with `pages` (N, ...) of each at their places; the old ones become invalid.

        Page 0 is overwritten with zeros; it only ever takes padding.
        """
        found = [*arrays]
        for first in range(0, len(places_N), MOST):
            some = slice(first, first + MOST)
            rows = [_padded(part[some]) for part in pages]
            found = self._scatter(found, _padded(places_N[some]), rows)
        return found


def _padded(x: np.ndarray) -> np.ndarray:
    """Zeros up to the pages of a call."""
    found = np.zeros((MOST, *x.shape[1:]), x.dtype)
    found[: len(x)] = x
    return found


def _gathered(arrays: list[jax.Array], places_M: jax.Array) -> list[jax.Array]:
    return [x[places_M] for x in arrays]


def _scattered(
    arrays: list[jax.Array], places_M: jax.Array, rows: list[jax.Array]
) -> list[jax.Array]:
    return [x.at[places_M].set(part) for x, part in zip(arrays, rows, strict=True)]
