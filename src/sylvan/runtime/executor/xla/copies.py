"""Copies whole pages within arrays, by functions that are compiled at the start.

Shapes: G groups of devices with different requests; each numbers its own pages from 0 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla.values import Pages
from sylvan.runtime.executor.xla.weights import DATA

_COPIES = 8
"""Page copies per call; a constant of the compiled function."""


class PageCopies:
    """Copies pages of some layers, and replaces their arrays by the results.

    Args:
        arrays: Pages by layer.
        layers: Layers whose pages are copied.
        mesh: The devices.
        per_group: Whether each group of devices has its own pages, as with keys and values.
    """

    def __init__(
        self,
        arrays: dict[int, Pages],
        layers: Sequence[int],
        mesh: Mesh,
        *,
        per_group: bool = False,
    ) -> None:
        self._arrays, self._layers = arrays, layers
        self._groups = mesh.shape[DATA] if per_group else 1
        by_group = PartitionSpec(DATA) if per_group else PartitionSpec()
        self._numbered = NamedSharding(mesh, by_group)
        own = self._own()
        kept = jax.tree.map(lambda x: x.sharding, own)
        run: Any = _copied
        if self._groups > 1:
            run = jax.shard_map(
                _copied,
                mesh=mesh,
                in_specs=(by_group, by_group),
                out_specs=by_group,
                axis_names={DATA},
                check_vma=False,
            )
        function = jax.jit(run, donate_argnums=0, out_shardings=kept)
        self._copy: Any = function.lower(own, self._numbers([])).compile() if own else None

    def run(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages (group, source, target), one after another."""
        for start in range(0, len(copies) if self._layers else 0, _COPIES):
            numbers = self._numbers(copies[start : start + _COPIES])
            self._arrays |= self._copy(self._own(), numbers)

    def _own(self) -> dict[int, Pages]:
        return {layer: self._arrays[layer] for layer in self._layers}

    def _numbers(self, copies: Sequence[tuple[int, int, int]]) -> jax.Array:
        """Sources and targets by group (G, copies, 2), padded with copies of page 0 to itself."""
        found = np.zeros((self._groups, _COPIES, 2), np.int32)
        for number, (group, source, target) in enumerate(copies):
            found[group, number] = source, target
        return jax.device_put(found, self._numbered)


def _copied(arrays: dict[int, Pages], copies_GN2: jax.Array) -> dict[int, Pages]:
    """Apply all copies of one group, one after another."""
    copies = copies_GN2[0]

    def one(number: Any, found: dict[int, Pages]) -> dict[int, Pages]:
        source, target = copies[number, 0], copies[number, 1]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), found)

    return jax.lax.fori_loop(0, _COPIES, one, arrays)
