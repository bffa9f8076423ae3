"""Copies of whole pages within arrays, by functions that were compiled at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla.values import Pages

_COPIES = 8
"""Page copies per call; a constant of the compiled function."""


class PageCopies:
    """Copies pages in some of `arrays`, and puts the new arrays in place of the old ones."""

    def __init__(self, arrays: dict[int, Pages], layers: Sequence[int], mesh: Mesh) -> None:
        self._arrays, self._layers = arrays, layers
        self._whole = NamedSharding(mesh, PartitionSpec())
        own = self._own()
        kept = jax.tree.map(lambda x: x.sharding, own)
        function = jax.jit(_copied, donate_argnums=0, out_shardings=kept)
        self._copy: Any = function.lower(own, self._numbers([])).compile() if own else None

    def run(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages, one after another."""
        for start in range(0, len(copies) if self._layers else 0, _COPIES):
            numbers = self._numbers(copies[start : start + _COPIES])
            self._arrays |= self._copy(self._own(), numbers)

    def _own(self) -> dict[int, Pages]:
        return {layer: self._arrays[layer] for layer in self._layers}

    def _numbers(self, copies: Sequence[tuple[int, int]]) -> jax.Array:
        """Sources and targets, padded with copies of page 0 to itself."""
        found = np.zeros((_COPIES, 2), np.int32)
        found[: len(copies)] = np.array(copies, np.int32).reshape(-1, 2)
        return jax.device_put(found, self._whole)


def _copied(arrays: dict[int, Pages], copies: jax.Array) -> dict[int, Pages]:
    """Apply all copies, one after another."""

    def one(number: Any, found: dict[int, Pages]) -> dict[int, Pages]:
        source, target = copies[number, 0], copies[number, 1]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), found)

    return jax.lax.fori_loop(0, _COPIES, one, arrays)
