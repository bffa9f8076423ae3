"""Copies rows of rotary tables to JAX devices, for image positions along three axes.

The worker half of vision writes the rows of a step into the spare rows of the model's tables (see
`Build.spare_positions`); here they are copied to the devices before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.native.copies import VectorCopy
from sylvan.kernels.native.graph import Graph
from sylvan.kernels.xla.values import Weights


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the model, and where its copy on the devices is, flat or by rows."""

    source: torch.Tensor
    kept: Any
    number: int


class RotaryTables:
    """Copies the spare rows of all tables.

    Args:
        graph: The traced graph; some of its constants are tables.
        weights: Weights of the program, in which tables are replaced.
        leaves: The tensors of `weights.tensors`.
        sources: The model's tables.
        first: The first spare row.
        mesh: The devices.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        leaves: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        first: int,
        mesh: Mesh,
    ) -> None:
        self._first = first
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._write = jax.jit(_written, donate_argnums=0, out_shardings=self._whole)
        copies = {id(c.source): id(c.data) for c in graph.copies if isinstance(c, VectorCopy)}
        numbers = {id(data): number for number, data in enumerate(graph.constants)}
        self._tables: list[_Table] = []
        for source in sources:
            number = numbers.get(copies.get(id(source), 0), -1)
            if number in weights.vectors:
                self._tables.append(_Table(source, weights.vectors, number))
            self._tables += [
                _Table(source, weights.tensors, number)
                for number, leaf in enumerate(leaves)
                if leaf is source
            ]

    def copy(self) -> None:
        """Copy all spare rows of all tables; the first call compiles it."""
        for table in self._tables:
            rows = table.source[self._first :].float().numpy()
            given = jax.device_put((rows, np.int32(self._first)), self._whole)
            table.kept[table.number] = self._write(table.kept[table.number], *given)


def _written(table: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    if table.ndim == 2:
        return jax.lax.dynamic_update_slice(table, rows, (first, 0))
    start = first * rows.shape[1]
    return jax.lax.dynamic_update_slice(table, rows.reshape(-1), (start,))
